"""Merging by groups: every token follows one token that is kept, itself or another.

A group becomes one token and unmerging copies that token to all of its members. Sums have one order
of additions (``segments.py``), so the same tokens give the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import chain

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
        counts: tokens kept of each grid, by sample. None where only the device knows them: using
            the plan makes the host wait for it then, unless ``count_kept`` did for many at once.
    """

    layout: CellLayout
    follows: Tensor
    blend: Blend
    counts: tuple[tuple[int, ...], ...] | None = None

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
        known = [plan.counts for plan in plans if plan.counts is not None]
        counts = tuple(chain(*known)) if len(known) == len(plans) else None
        return GroupPlan(self.layout, follows, self.blend, counts)

    def whole(self) -> GroupPlan:
        """For the same samples, the plan by which every token is kept."""
        tokens = torch.arange(self.tokens, device=self.follows.device)
        counts = tuple(cells.tokens for cells in self.layout.cells)
        return replace(self, follows=tokens.repeat(self.batch, 1), counts=(counts,) * self.batch)

    @cached_property
    def _tables(self) -> _Tables:
        counts = self.counts or count_kept([self])[0].counts
        assert counts is not None
        return _build_tables(self.layout, self.follows, counts)


def count_kept(plans: Sequence[GroupPlan]) -> list[GroupPlan]:
    """The same plans with their counts known. The host waits once for the device of them all."""
    kept = [_kept_by_grid(plan.layout, plan.follows) for plan in plans]
    sums = torch.cat([torch.stack([grid.sum(1) for grid in grids], 1).flatten() for grids in kept])
    flat = iter(sums.tolist())
    return [
        replace(
            plan,
            counts=tuple(tuple(next(flat) for _ in plan.grids) for _ in range(plan.batch)),
        )
        for plan in plans
    ]


def _kept_by_grid(layout: CellLayout, follows: Tensor) -> tuple[Tensor, ...]:
    """``(batch, tokens of the grid)`` for each grid: True where a token is kept."""
    token = torch.arange(follows.shape[1], device=follows.device)
    return (follows == token).split([cells.tokens for cells in layout.cells], 1)


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


def _build_tables(
    layout: CellLayout, follows: Tensor, counts: tuple[tuple[int, ...], ...]
) -> _Tables:
    batch, tokens = follows.shape
    token = torch.arange(tokens, device=follows.device)
    keeps = _kept_by_grid(layout, follows)
    kept = tuple(map(max, zip(*counts, strict=True)))
    padding = None
    if any(sample != kept for sample in counts):
        padding = torch.cat(
            [
                torch.arange(slots, device=token.device) >= grid.sum(1, keepdim=True)
                for grid, slots in zip(keeps, kept, strict=True)
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
