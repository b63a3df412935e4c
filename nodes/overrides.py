"""Replaces the ``forward`` of modules for the span of one model call, and leaves no trace.

Hooks and object patches would outlive the call or leave a bound method behind; an instance
attribute that is set and removed touches no class, no other branch and no saved state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Override = tuple[nn.Module, Callable[..., Any]]
_ABSENT = object()


@contextmanager
def overriding(overrides: Iterable[Override]) -> Iterator[None]:
    """Let each module run its function instead of ``forward`` while the context is open."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module, function in overrides:
            before.append((module, vars(module).get("forward", _ABSENT)))
            vars(module)["forward"] = function
        yield
    finally:
        for module, forward in reversed(before):
            if forward is _ABSENT:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
