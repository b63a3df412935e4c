"""Merging and unmerging as linear maps (ToMA section 3.2).

With A the ``(destinations, tokens)`` assignment whose columns sum to 1:

* merge:   ``X_m = A~ X`` with ``A~ = A / rowsum(A)``, every destination the mean of its group;
* unmerge: ``Y = A^T Y_m``, which for a hard assignment is exactly the pseudo-inverse of ``A~``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .regions import RegionLayout


@dataclass(frozen=True, eq=False)
class MergePlan:
    """One pattern of merging for a batch, ready to be applied many times.

    Attributes:
        layout: the regions that the maps work in.
        destinations: ``(batch, regions, kept)`` picked places within each region.
        merge_weights: ``(batch, regions, kept, size)`` A~ in the model's dtype.
        unmerge_weights: ``(batch, regions, size, kept)`` A transposed, in the model's dtype.

    Sequences may carry a prefix (text tokens) that passes through whole.
    """

    layout: RegionLayout
    destinations: Tensor
    merge_weights: Tensor
    unmerge_weights: Tensor

    @property
    def batch(self) -> int:
        return self.destinations.shape[0]

    @property
    def tokens(self) -> int:
        return self.layout.tokens

    @property
    def merged(self) -> int:
        return self.layout.merged

    def fits(self, x: Tensor, prefix: int = 0) -> bool:
        """True when ``x`` is a batch of the sequences that this plan was made for."""
        return x.shape[0] == self.batch and x.shape[1] == prefix + self.tokens

    def merge(self, x: Tensor, prefix: int = 0) -> Tensor:
        """``(batch, prefix + tokens, channels)`` -> ``(batch, prefix + merged, channels)``."""
        regions = self.layout.split(x[:, prefix:])
        merged = self.layout.compact(self.merge_weights.to(x.dtype) @ regions)
        return torch.cat((x[:, :prefix], merged), 1) if prefix else merged

    def unmerge(self, y: Tensor, prefix: int = 0) -> Tensor:
        """``(batch, prefix + merged, channels)`` -> ``(batch, prefix + tokens, channels)``."""
        slots = self.layout.expand(y[:, prefix:])
        whole = self.layout.join(self.unmerge_weights.to(y.dtype) @ slots)
        return torch.cat((y[:, :prefix], whole), 1) if prefix else whole

    def positions(self) -> Tensor:
        """``(batch, merged)`` token of the sequence at which every merged token stands."""
        layout = self.layout
        first = torch.arange(layout.regions, device=layout.index.device) * layout.size
        places = (self.destinations + first[:, None]).flatten()
        tokens = layout.index.flatten().index_select(0, places)
        return layout.compact(tokens.reshape(self.destinations.shape))

    def groups(self) -> Tensor:
        """``(batch, tokens)`` merged token that every token follows most."""
        layout = self.layout
        first = torch.arange(layout.regions, device=layout.index.device) * layout.kept
        slots = self.unmerge_weights.argmax(-1, keepdim=True) + first[:, None, None]
        return layout.slot_of[layout.join(slots).squeeze(-1)]

    def chunk(self, start: int, rows: int) -> MergePlan:
        """The plan of ``rows`` samples from sample ``start`` on."""
        return MergePlan(
            self.layout,
            self.destinations.narrow(0, start, rows),
            self.merge_weights.narrow(0, start, rows),
            self.unmerge_weights.narrow(0, start, rows),
        )


def join_plans(plans: list[MergePlan]) -> MergePlan:
    """One plan for the samples of several plans of the same layout, in order."""
    if len(plans) == 1:
        return plans[0]
    return MergePlan(
        plans[0].layout,
        torch.cat([plan.destinations for plan in plans]),
        torch.cat([plan.merge_weights for plan in plans]),
        torch.cat([plan.unmerge_weights for plan in plans]),
    )


def assign(
    x: Tensor, layout: RegionLayout, destinations: Tensor, temperature: float, dtype: torch.dtype
) -> MergePlan:
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
    return MergePlan(
        layout, destinations, merge.to(dtype), assignment.transpose(-1, -2).contiguous().to(dtype)
    )
