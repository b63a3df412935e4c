"""Merging and unmerging as linear maps (ToMA section 3.2)."""

# With A the (destinations, tokens) assignment whose columns sum to 1:
#
# * merge:   X_m = A~ X with A~ = A / rowsum(A), every destination the mean of its group;
# * unmerge: Y = A^T Y_m, which for a hard assignment is exactly the pseudo-inverse of A~.
#
# Where detail is kept (detail.py), merging picks the destinations and unmerging carries their
# change to the rest.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .plan import MergePlan
from .regions import Grid, RegionLayout
from .rows import rows_of_all


@dataclass(frozen=True, eq=False)
class RegionPlan(MergePlan):
    """A pattern of merging within regions, towards destinations in each.

    Attributes:
        layout: the regions that the maps work in.
        destinations: ``(batch, regions, kept)`` picked places within each region.
        unmerge_weights: ``(batch, regions, size, kept)`` how a token follows the destinations of
            its region, in the model's dtype.
    """

    layout: RegionLayout
    destinations: Tensor
    unmerge_weights: Tensor

    @property
    def batch(self) -> int:
        return self.destinations.shape[0]

    @property
    def grids(self) -> tuple[Grid, ...]:
        return self.layout.grids

    @property
    def merged_per_grid(self) -> tuple[int, ...]:
        return self.layout.merged_per_grid

    def unmerge_image(self, y: Tensor) -> Tensor:
        slots = self.layout.expand(y)
        return self.layout.join(self.unmerge_weights.to(y.dtype) @ slots)

    def positions(self) -> Tensor:
        layout = self.layout
        first = torch.arange(layout.regions, device=layout.index.device) * layout.size
        places = (self.destinations + first[:, None]).flatten()
        tokens = layout.index.flatten().index_select(0, places)
        return layout.compact(tokens.reshape(self.destinations.shape))

    def groups(self) -> Tensor:
        layout = self.layout
        first = torch.arange(layout.regions, device=layout.index.device) * layout.kept
        slots = self.unmerge_weights.argmax(-1, keepdim=True) + first[:, None, None]
        return layout.slot_of[layout.join(slots).squeeze(-1)]


@dataclass(frozen=True, eq=False)
class LinearPlan(RegionPlan):
    """ToMA's pattern of merging: two small matrices per region.

    Attributes:
        merge_weights: ``(batch, regions, kept, size)`` A~ in the model's dtype; the unmerge
            weights are A transposed.
    """

    merge_weights: Tensor

    def merge_image(self, x: Tensor) -> Tensor:
        regions = self.layout.split(x)
        return self.layout.compact(self.merge_weights.to(x.dtype) @ regions)

    def joined(self, others: Sequence[LinearPlan]) -> LinearPlan:
        plans = (self, *others)
        return LinearPlan(
            self.layout,
            torch.cat([plan.destinations for plan in plans]),
            torch.cat([plan.unmerge_weights for plan in plans]),
            torch.cat([plan.merge_weights for plan in plans]),
        )


@dataclass(frozen=True, eq=False)
class CarryPlan(RegionPlan):
    """A pattern in which destinations stand for themselves and carry their change to the rest.

    Merging picks the destinations as they are: a mean of noisy tokens has less noise than the model
    expects. A destination unmerges to exactly itself; every other token, a source, follows its
    destinations as far as it is like them (weights times cosine), and ``detail.py`` keeps the rest.
    """

    def merge_image(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1).index_select(0, self._kept_rows)
        return rows.unflatten(0, (self.batch, -1))

    def of_sources(self, detail: Tensor) -> Tensor:
        """``(batch, sources + 1, channels)`` -> ``(batch, tokens, channels)``.

        Each source gets its row, in order; destinations get the last one.
        """
        rows = detail.flatten(0, 1).index_select(0, self._sources[1])
        return rows.unflatten(0, (self.batch, -1))

    @property
    def source_index(self) -> Tensor:
        """``(batch, tokens - merged)`` tokens that merge away, rising."""
        return self._sources[0]

    @cached_property
    def _sources(self) -> tuple[Tensor, Tensor]:
        """``source_index``, and the row of detail of every token, flat; made at whole steps."""
        positions, (batch, tokens) = self.positions(), (self.batch, self.tokens)
        is_kept = torch.zeros(batch, tokens, dtype=torch.long, device=positions.device)
        is_kept = is_kept.scatter(1, positions, 1)
        sources = tokens - self.merged
        index = is_kept.argsort(dim=1, stable=True)[:, :sources]
        place = torch.arange(sources, device=index.device).expand(batch, -1)
        row = torch.full_like(is_kept, sources).scatter(1, index, place)
        return index, rows_of_all(row, sources + 1)

    @cached_property
    def _kept_rows(self) -> Tensor:
        return rows_of_all(self.positions(), self.tokens)

    def joined(self, others: Sequence[CarryPlan]) -> CarryPlan:
        plans = (self, *others)
        return CarryPlan(
            self.layout,
            torch.cat([plan.destinations for plan in plans]),
            torch.cat([plan.unmerge_weights for plan in plans]),
        )


def assign(
    x: Tensor, layout: RegionLayout, destinations: Tensor, temperature: float, dtype: torch.dtype
) -> LinearPlan:
    """Weights of a merge towards given destinations; none merges with a protected one.

    ``A = softmax over destinations of S_dst,all / tau``, computed in fp32 and rounded once.

    Args:
        x: ``(batch, regions, size, channels)`` tokens at unit length, fp32.
        layout: the regions of ``x``.
        destinations: ``(batch, regions, kept)`` picked places.
        temperature: tau.
        dtype: dtype in which the maps will be applied.
    """
    cosine = _cosine(x, layout, destinations)
    if layout.protected is not None:
        cosine = (
            cosine.masked_fill(layout.protected[:, None, :], -torch.inf)
            .masked_fill(_protected(layout, destinations)[..., None], -torch.inf)
            .masked_fill(_own(layout, destinations), 1.0)
        )
    assignment = _assignment(cosine, layout, temperature)
    size = assignment.sum(-1, keepdim=True)
    # Only an unused slot has an empty group: it stays zero instead of 0 / 0.
    merge = assignment / size.masked_fill(size == 0, 1.0)
    return LinearPlan(layout, destinations, assignment.mT.contiguous().to(dtype), merge.to(dtype))


def carry(
    x: Tensor, layout: RegionLayout, destinations: Tensor, temperature: float, dtype: torch.dtype
) -> CarryPlan:
    """Weights by which destinations carry their change to the other tokens.

    Those of ``assign`` times the cosine of token and destination, which is how much of a change
    alike tokens share; a destination follows itself alone. Arguments are those of ``assign``.
    """
    cosine = _cosine(x, layout, destinations)
    weights = _assignment(cosine, layout, temperature) * cosine.clamp_min(0)
    own = _own(layout, destinations)
    weights = weights.masked_fill(own.any(-2, keepdim=True), 0.0).masked_fill(own, 1.0)
    return CarryPlan(layout, destinations, weights.mT.contiguous().to(dtype))


def _cosine(x: Tensor, layout: RegionLayout, destinations: Tensor) -> Tensor:
    """``(batch, regions, kept, size)`` similarity of destinations and tokens."""
    picked = rows_of_all(destinations.flatten(0, 1), layout.size)
    rows = x.reshape(-1, x.shape[-1]).index_select(0, picked).reshape(*destinations.shape, -1)
    # A destination belongs to its own group, even where it is a zero token.
    return (rows @ x.transpose(-1, -2)).masked_fill(_own(layout, destinations), 1.0)


def _own(layout: RegionLayout, destinations: Tensor) -> Tensor:
    """``(batch, regions, kept, size)`` True where a destination meets itself, unused slots not."""
    own = torch.arange(layout.size, device=destinations.device) == destinations[..., None]
    return own.masked_fill(_unused(layout)[:, :, None], False)


def _protected(layout: RegionLayout, destinations: Tensor) -> Tensor:
    """``(batch, regions, kept)`` True where a destination is protected."""
    assert layout.protected is not None
    return layout.protected.expand(len(destinations), -1, -1).gather(-1, destinations)


def _unused(layout: RegionLayout) -> Tensor:
    """``(regions, kept)`` True where a region keeps fewer tokens than there are slots."""
    return torch.arange(layout.kept, device=layout.counts.device) >= layout.counts[:, None]


def _assignment(cosine: Tensor, layout: RegionLayout, temperature: float) -> Tensor:
    scores = (cosine / temperature).masked_fill(_unused(layout)[:, :, None], -torch.inf)
    return scores.softmax(-2).masked_fill(~layout.valid[:, None, :], 0.0)
