"""Reaches into ComfyUI's attention through ``optimized_attention_override``.

Another node's override stays in force: it runs inside ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..toma_core.detail import Carry

_OVERRIDE = "optimized_attention_override"


def with_attention(
    options: Mapping[str, Any] | None, attention: Callable[..., Tensor]
) -> dict[str, Any]:
    """``options`` of a block under which its attention is ``attention(run, q, k, v, ...)``.

    ``run`` is what would have run, called with the rest of the arguments.
    """
    options = dict(options or {})
    inner = options.get(_OVERRIDE)

    def override(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        run = function if inner is None else functools.partial(inner, function)
        return attention(run, *args, **kwargs)

    options[_OVERRIDE] = override
    return options


def with_all_keys(options: Mapping[str, Any] | None, carry: Carry, text: int = 0) -> dict[str, Any]:
    """Options whose self-attention sees the keys of all tokens, those merged away as kept.

    Args:
        options: of the block.
        carry: of the block's attention.
        text: tokens that lead the sequence.
    """

    def attention(
        run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        axis = 2 if kwargs.get("skip_reshape") else 1
        # Keys that another node added to are no picture of ours.
        if k.shape[axis] == q.shape[axis]:
            k, v = carry.keys(k, v, axis, text)
        return run(q, k, v, *args, **kwargs)

    return with_attention(options, attention)
