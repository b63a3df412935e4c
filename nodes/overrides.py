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


class Original:
    """What a module runs without us; called like its ``forward``.

    It looks the function up anew instead of keeping the bound method, which is another object in
    every call and run: compiled code would take it for another function and be compiled again.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._replacement: Callable[..., Any] | None = None

    def look(self) -> None:
        """Note the ``forward`` of now: another node may have put its own in place."""
        self._replacement = vars(self._module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._replacement is not None:
            return self._replacement(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


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
