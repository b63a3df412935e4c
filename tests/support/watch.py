"""Sees every plan that a run makes, and what attention works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from comfyui_toma.toma_core import session
from comfyui_toma.toma_core.selection import unit_rows
from torch import Tensor


@dataclass(frozen=True)
class Made:
    """One plan at the moment it was made, for one condition at one place."""

    block: int
    selection: int
    plan: Any
    features: Tensor

    @property
    def likeness(self) -> float:
        """Cosine of a token to the token most like it, the mean over all."""
        units = unit_rows(self.features)
        cosine = units @ units.mT
        cosine.diagonal(dim1=-2, dim2=-1).fill_(-1.0)
        return float(cosine.amax(-1).mean())

    @property
    def merged_away(self) -> list[int]:
        """Tokens that merged into others, by sample."""
        groups = self.plan.groups()
        return [self.plan.tokens - len(sample.unique()) for sample in groups]


@contextmanager
def plans() -> Iterator[list[Made]]:
    """The plans made while the context is open, in order."""
    made: list[Made] = []
    build_plan = session.build_plan

    def building(x: Any, layout: Any, config: Any, moment: Any) -> Any:
        plan = build_plan(x, layout, config, moment)
        made.append(Made(moment.place.block, moment.selection, plan, x))
        return plan

    with mock.patch.object(session, "build_plan", building):
        yield made


def attention_spy(model: Any) -> tuple[Any, list[tuple[int, int, bool]]]:
    """A clone of ``model`` and a list of what its attention sees: queries, keys, whether a mask."""
    seen: list[tuple[int, int, bool]] = []

    def attention(function: Any, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any):
        axis = 2 if kwargs.get("skip_reshape") else 1
        mask = args[0] if args else kwargs.get("mask")
        seen.append((q.shape[axis], k.shape[axis], mask is not None))
        return function(q, k, v, heads, *args, **kwargs)

    spied = model.clone()
    options = spied.model_options.setdefault("transformer_options", {})
    options["optimized_attention_override"] = attention
    return spied, seen
