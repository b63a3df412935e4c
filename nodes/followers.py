"""What belongs to Flux's tokens, cut down to those that are left.

Rotary rows, attention masks and modulation ranges: a merged token stands where its destination
stood.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from ..toma_core.merge import CarryPlan
from ..toma_core.plan import MergePlan
from ..toma_core.rows import take_rows


class Keys(Enum):
    """Which keys a mask is for."""

    WHOLE = "of all tokens"
    MERGED = "of the tokens left"
    REORDERED = "of the tokens left, then of those merged away"


class Followers:
    """Tensors that belong to tokens, cut down to the tokens that are left.

    All blocks of a call get the same rotary rows and mask, so each is cut once per plan.
    """

    def __init__(self) -> None:
        self._cut: dict[str, tuple[Tensor, MergePlan, Tensor]] = {}

    def rotary(self, plan: MergePlan, pe: Tensor | None, prefix: int) -> Tensor | None:
        """``(batch or 1, 1, tokens, ...)`` -> ``(batch, 1, tokens left, ...)``."""
        if pe is None:
            return None
        return self._follow("rotary", plan, pe, lambda: {2: _left(plan, prefix)})

    def mask(self, plan: MergePlan, mask: Tensor | None, prefix: int, keys: Keys) -> Tensor | None:
        """``(..., queries or 1, keys)`` -> the same of the tokens left, per sample."""
        if mask is None:
            return None

        def order() -> dict[int, Tensor]:
            left = _left(plan, prefix)
            order = {-2: left} if mask.shape[-2] > 1 else {}
            if keys is Keys.REORDERED:
                assert isinstance(plan, CarryPlan)  # no other has sources
                order[-1] = torch.cat((left, plan.source_index + prefix), 1)
            elif keys is Keys.MERGED:
                order[-1] = left
            return order

        return self._follow(f"mask, keys {keys.value}", plan, mask, order)

    def _follow(
        self, name: str, plan: MergePlan, x: Tensor, order: Callable[[], dict[int, Tensor]]
    ) -> Tensor:
        """``x`` along each axis by its index of ``order``, cut once per plan."""
        source, made_for, cut = self._cut.get(name, (None, None, None))
        if cut is None or source is not x or made_for is not plan:
            cut = x[None] if x.ndim == 2 else x
            for axis, index in order().items():
                cut = take_rows(cut, index, axis)
            self._cut[name] = (x, plan, cut)
        return cut


def _left(plan: MergePlan, prefix: int) -> Tensor:
    """``(batch, prefix + merged)`` tokens of the sequence that are left."""
    positions = plan.positions() + prefix
    text = torch.arange(prefix, device=positions.device).expand(plan.batch, prefix)
    return torch.cat((text, positions), 1)


def merged_ranges(plan: MergePlan, ranges: list, lead: int) -> list | None:
    """Token ranges ``(start, end, ...)`` in terms of merged tokens.

    ``lead`` text tokens stand first. None where a range begins or ends inside a grid, since
    merged tokens have no order there.
    """
    edges = {0: 0, lead: lead}
    whole, merged = lead, lead
    for (rows, columns), left in zip(plan.grids, plan.merged_per_grid, strict=True):
        whole += rows * columns
        merged += left
        edges[whole] = merged
    if any(start not in edges or end not in edges for start, end, *_ in ranges):
        return None
    return [(edges[start], edges[end], *rest) for start, end, *rest in ranges]
