"""Merging and unmerging as linear maps (ToMA section 3.2).

With A the ``(destinations, tokens)`` assignment whose columns sum to 1:

* merge:   ``X_m = A~ X`` with ``A~ = A / rowsum(A)``, every destination the mean of its group;
* unmerge: ``Y = A^T Y_m``, which for a hard assignment is exactly the pseudo-inverse of ``A~``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .plan import MergePlan
from .regions import Grid, RegionLayout


@dataclass(frozen=True, eq=False)
class LinearPlan(MergePlan):
    """ToMA's pattern of merging: two small matrices per region.

    Attributes:
        layout: the regions that the maps work in.
        destinations: ``(batch, regions, kept)`` picked places within each region.
        merge_weights: ``(batch, regions, kept, size)`` A~ in the model's dtype.
        unmerge_weights: ``(batch, regions, size, kept)`` A transposed, in the model's dtype.
    """

    layout: RegionLayout
    destinations: Tensor
    merge_weights: Tensor
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

    def merge_image(self, x: Tensor) -> Tensor:
        regions = self.layout.split(x)
        return self.layout.compact(self.merge_weights.to(x.dtype) @ regions)

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

    def joined(self, others: Sequence[LinearPlan]) -> LinearPlan:
        plans = (self, *others)
        return LinearPlan(
            self.layout,
            torch.cat([plan.destinations for plan in plans]),
            torch.cat([plan.merge_weights for plan in plans]),
            torch.cat([plan.unmerge_weights for plan in plans]),
        )


def assign(
    x: Tensor, layout: RegionLayout, destinations: Tensor, temperature: float, dtype: torch.dtype
) -> LinearPlan:
    """Weights of a merge towards given destinations.

    ``A = softmax over destinations of S_dst,all / tau``, computed in fp32 and rounded once.

    Args:
        x: ``(batch, regions, size, channels)`` tokens at unit length, fp32.
        layout: the regions of ``x``.
        destinations: ``(batch, regions, kept)`` picked places.
        temperature: tau.
        dtype: dtype in which the maps will be applied.
    """
    first = torch.arange(x.shape[0] * layout.regions, device=x.device) * layout.size
    picked = (destinations.reshape(-1, layout.kept) + first[:, None]).flatten()
    rows = x.reshape(-1, x.shape[-1]).index_select(0, picked).reshape(*destinations.shape, -1)
    own = torch.arange(layout.size, device=x.device) == destinations[..., None]
    # A destination belongs to its own group, even where it is a zero token.
    scores = (rows @ x.transpose(-1, -2)).masked_fill(own, 1.0) / temperature
    unused = torch.arange(layout.kept, device=x.device) >= layout.counts[:, None]
    scores = scores.masked_fill(unused[:, :, None], -torch.inf)
    assignment = scores.softmax(-2).masked_fill(~layout.valid[:, None, :], 0.0)
    size = assignment.sum(-1, keepdim=True)
    # Only an unused slot has an empty group: it stays zero instead of 0 / 0.
    merge = assignment / size.masked_fill(size == 0, 1.0)
    return LinearPlan(
        layout, destinations, merge.to(dtype), assignment.transpose(-1, -2).contiguous().to(dtype)
    )
