"""Detail that merging would lose, kept from the last whole step (not in the paper).

Averaging or picking tokens loses what tells a token from its destination. On the steps at which
destinations are chosen, a function of tokens (a block, or a module of one) therefore runs whole,
and what merging would have lost of its result is kept; so are keys and values of the tokens that
merge away. Until the next choice the function runs on the destinations alone and attends to their
new keys and to the kept ones. Every other token follows the change of its destination, and the kept
detail is added back. docs/quality.md has what it is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .merge import CarryPlan
from .plan import MergePlan
from .rows import take_rows

Packed = tuple[Tensor, ...]
"""A tensor as it is kept: itself, or whole numbers of 8 bits and a scale per row."""


def pack(x: Tensor) -> Packed:
    """``x`` in 8 bits per value and a scale per row; in fp32 as it is.

    A row's largest value keeps the precision that it has in bf16, so half-precision models lose no
    more than they round away anyhow, in half of the memory.
    """
    if x.dtype is torch.float32:
        return (x,)
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (x / scale).round().to(torch.int8), scale.to(x.dtype)


def unpack(packed: Packed) -> Tensor:
    """The tensor that was packed."""
    values, *scale = packed
    return values.to(scale[0].dtype) * scale[0] if scale else values


@dataclass(eq=False)
class Kept:
    """What is kept of one function of tokens, for the tokens that merge away.

    Attributes:
        detail: ``(batch, sources + 1, channels)`` its result less what the destinations tell of it;
            the last row is zero, for tokens that lose nothing.
        keys, values: of its self-attention, the tokens on the axis on which attention has them;
            empty where it has none.
    """

    detail: Packed
    keys: Packed = ()
    values: Packed = ()

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for packed in self._parts for x in packed)

    def rows(self, first: int, count: int) -> Kept:
        """Views of some samples."""
        return Kept(*(tuple(x.narrow(0, first, count) for x in packed) for packed in self._parts))

    def joined(self, others: list[Kept]) -> Kept:
        """The samples of this and others, in order."""
        parts = zip(*(kept._parts for kept in (self, *others)), strict=True)
        return Kept(*(tuple(torch.cat(each) for each in zip(*part, strict=True)) for part in parts))

    @property
    def _parts(self) -> tuple[Packed, Packed, Packed]:
        return self.detail, self.keys, self.values


class Carry:
    """One function of tokens during one call: the way to the tokens it works on, and back.

    Args:
        plan: of the call.
        name: of the function within its place.
        memory: what is kept at the place by name; None where nothing is to be kept.
        whole: the function is to run whole, and to be kept.
    """

    def __init__(
        self, plan: MergePlan, name: str, memory: dict[str, Kept] | None, whole: bool
    ) -> None:
        self.plan = plan
        self._name = name
        self._memory = memory
        kept = None if memory is None or whole else memory.get(name)
        # A function that did not run at the whole step does so now.
        self.is_whole = memory is not None and kept is None
        self._kept = kept
        self._keys: tuple[Packed, Packed] = ((), ())

    @property
    def sees_all_keys(self) -> bool:
        """True where queries attend to all tokens, whichever of them are merged away."""
        return self._memory is not None

    def take(self, x: Tensor, prefix: int = 0) -> Tensor:
        """``(batch, prefix + tokens, channels)`` -> the tokens that the function works on."""
        return x if self.is_whole else self.plan.merge(x, prefix)

    def give(self, y: Tensor, prefix: int = 0) -> Tensor:
        """The function's result for all tokens, from its result for those it worked on."""
        if self.is_whole:
            self._keep(y[:, prefix:])
            return y
        if self._kept is None:
            return self.plan.unmerge(y, prefix)
        plan = _carrying(self.plan)
        image = plan.unmerge_image(y[:, prefix:]) + plan.of_sources(unpack(self._kept.detail))
        return torch.cat((y[:, :prefix], image), 1) if prefix else image

    def keys(self, k: Tensor, v: Tensor, axis: int, prefix: int) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, from those of the tokens that the function works on.

        Those of tokens merged away follow the others, as ``CarryPlan.source_index`` lists them.

        Args:
            k, v: with ``prefix`` and tokens along ``axis``.
        """
        if self.is_whole:
            plan = _carrying(self.plan)
            index = plan.source_index + prefix
            self._keys = pack(take_rows(k, index, axis)), pack(take_rows(v, index, axis))
        elif self._kept is not None and self._kept.keys:
            k = torch.cat((k, unpack(self._kept.keys)), axis)
            v = torch.cat((v, unpack(self._kept.values)), axis)
        return k, v

    def _keep(self, y: Tensor) -> None:
        plan = _carrying(self.plan)
        told = plan.unmerge_image(plan.merge_image(y))
        lost = take_rows(y - told, plan.source_index, 1)
        detail = torch.cat((lost, torch.zeros_like(lost[:, :1])), 1)
        assert self._memory is not None  # else nothing runs whole
        self._memory[self._name] = Kept(pack(detail), *self._keys)


def _carrying(plan: MergePlan) -> CarryPlan:
    assert isinstance(plan, CarryPlan)  # the session makes no other where details are kept
    return plan
