"""The sole reader of ``transformer_options``: what ComfyUI says about one call of the model."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

KEY = "toma"
"""Under this key everything of ours stands: options, wrappers, log lines."""


@dataclass(frozen=True)
class Call:
    """One call of the diffusion model.

    Attributes:
        arguments: of ``BaseModel.apply_model``, by name.
        sigma: noise level of the call, None where the host does not say.
        conditions: one key per equal share of the batch.
    """

    arguments: Mapping[str, Any]
    sigma: float | None
    conditions: tuple[Hashable, ...]

    @property
    def options(self) -> Mapping[str, Any]:
        return self.arguments.get("transformer_options") or {}

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, 0 where there is none."""
        prompt = self.arguments.get("c_crossattn")
        return 0 if prompt is None else prompt.shape[1]

    @property
    def patches(self) -> Mapping[str, list]:
        """Patches of other nodes inside blocks, by patch point."""
        return self.options.get("patches") or {}

    @property
    def replacements(self) -> Mapping[str, Mapping]:
        return self.options.get("patches_replace") or {}


class CallReader:
    """Reads calls of one sampling run.

    A tiling node may call the model several times per evaluation with the same conditions and
    another part of the picture each time: the n-th such call gets keys of its own.
    """

    def __init__(self) -> None:
        self._occurrences: Counter[Hashable] = Counter()

    def begin_evaluation(self) -> None:
        """Forget the calls counted so far: the sampler asks for the next prediction."""
        self._occurrences.clear()

    def read(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Call:
        """The call behind the arguments of ``function``, which is ``BaseModel.apply_model``.

        Bound by name, since ComfyUI versions differ in position and in what they add.
        """
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        arguments = {**arguments, **arguments.pop("kwargs", {})}
        options = arguments.get("transformer_options") or {}
        keys = []
        for key in _condition_keys(options):
            keys.append((key, self._occurrences[key]))
            self._occurrences[key] += 1
        return Call(arguments, _sigma(options), tuple(keys))


def _condition_keys(options: Mapping[str, Any]) -> list[Hashable]:
    """``cond_or_uncond`` and ``uuids`` together name a condition; alone, either may repeat."""
    indices = options.get("cond_or_uncond") or []
    uuids = options.get("uuids") or []
    if indices and len(indices) == len(uuids):
        return list(zip(indices, uuids, strict=True))
    return list(uuids or indices) or [None]


def _sigma(options: Mapping[str, Any]) -> float | None:
    sigmas = options.get("sigmas")
    return None if sigmas is None else float(sigmas.flatten()[0])
