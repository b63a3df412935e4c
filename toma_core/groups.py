"""Merging by groups: every token follows one token that is kept, itself or another.

A group becomes one token and unmerging copies that token to all of its members. Sums have one order
of additions (``segments.py``), so the same tokens give the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from .cells import CellLayout
from .plan import MergePlan
from .regions import Grid
from .rows import rows_of_all, take_rows
from .segments import Segments, build_segments


class Blend(Enum):
    """What becomes of a group."""

    MEAN = "the mean of its tokens (ToMe)"
    PRUNE = "the kept token alone (ToFu, where a network is far from linear)"
    NORM = "the direction of the mean with the largest norm of the group (ToFu's MLERP)"


@dataclass(frozen=True, eq=False)
class GroupPlan(MergePlan):
    """A pattern of merging in which every token belongs to one group.

    Attributes:
        layout: the grids.
        follows: ``(batch, tokens)`` kept token of the sequence that every token follows; a kept
            token follows itself.
        blend: what becomes of a group.
        kept: tokens kept of each grid, the same for every sample; None where samples differ. They
            are counted then when the plan is first used, the one time that the host waits for the
            device.
    """

    layout: CellLayout
    follows: Tensor
    blend: Blend
    kept: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        return self.follows.shape[0]

    @property
    def grids(self) -> tuple[Grid, ...]:
        return self.layout.grids

    @property
    def merged_per_grid(self) -> tuple[int, ...]:
        return self._tables.merged_per_grid

    @property
    def padding(self) -> Tensor | None:
        return self._tables.padding

    def positions(self) -> Tensor:
        return self._tables.places

    def groups(self) -> Tensor:
        return self._tables.slots

    def merge_image(self, x: Tensor) -> Tensor:
        tables = self._tables
        if self.blend is Blend.PRUNE:
            return take_rows(x, tables.places, 1)
        merged = tables.segments.mean(x)
        if self.blend is Blend.NORM:
            longest = tables.segments.largest(_norm(x).squeeze(-1))
            norm = _norm(merged)
            # Opposite tokens cancel: their mean has no direction and stays zero.
            merged = merged * (longest / norm.masked_fill(norm == 0, torch.inf))
        return merged.to(x.dtype)

    def unmerge_image(self, y: Tensor) -> Tensor:
        whole = y.flatten(0, 1).index_select(0, self._tables.slot_rows)
        return whole.unflatten(0, (self.batch, -1))

    def joined(self, others: Sequence[GroupPlan]) -> GroupPlan:
        plans = (self, *others)
        follows = torch.cat([plan.follows for plan in plans])
        return GroupPlan(self.layout, follows, self.blend, self.kept)

    @cached_property
    def _tables(self) -> _Tables:
        return _build_tables(self.layout, self.follows, self.kept)


@dataclass(frozen=True, eq=False)
class _Tables:
    """Index tables of a group plan.

    Attributes:
        merged_per_grid: slots of each grid; a slot is a place in the merged sequence.
        padding: ``(batch, merged)`` True where a slot has no group; None where all have one.
        slots: ``(batch, tokens)`` slot of every token's group.
        slot_rows: the same as rows of all samples in one, flat.
        places: ``(batch, merged)`` kept token of every slot; 0 for padding.
        segments: tokens slot by slot.
    """

    merged_per_grid: tuple[int, ...]
    padding: Tensor | None
    slots: Tensor
    slot_rows: Tensor
    places: Tensor
    segments: Segments


def _build_tables(layout: CellLayout, follows: Tensor, kept: tuple[int, ...] | None) -> _Tables:
    batch, tokens = follows.shape
    token = torch.arange(tokens, device=follows.device)
    keeps = (follows == token).split([cells.tokens for cells in layout.cells], 1)
    padding = None
    if kept is None:
        counts = torch.stack([grid.sum(1) for grid in keeps], 1)
        per_sample = counts.tolist()
        kept = tuple(map(max, zip(*per_sample, strict=True)))
        if any(tuple(sample) != kept for sample in per_sample):
            padding = torch.cat(
                [
                    torch.arange(slots, device=token.device) >= counts[:, grid, None]
                    for grid, slots in enumerate(kept)
                ],
                1,
            )
    merged = sum(kept)
    # Kept tokens fill the slots of their grid in sequence order.
    first = [sum(kept[:grid]) for grid in range(len(kept))]
    slot = torch.cat([grid.cumsum(1) - 1 + at for grid, at in zip(keeps, first, strict=True)], 1)
    slots = slot.gather(1, follows)
    # Tokens that are not kept write to one slot too many, which is cut off.
    slot = slot.masked_fill(follows != token, merged)
    places = torch.zeros(batch, merged + 1, dtype=torch.long, device=token.device)
    places = places.scatter(1, slot, token.expand(batch, tokens))[:, :merged]
    return _Tables(
        kept,
        padding,
        slots,
        rows_of_all(slots, merged),
        places,
        build_segments(slots, merged),
    )


def _norm(x: Tensor) -> Tensor:
    """``(..., channels)`` -> ``(..., 1)`` length of every row, in fp32."""
    return torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)
