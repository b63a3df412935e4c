"""Decides in ComfyUI's stead whether conditions share a model call, and watches the calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.samplers
import pytest

JOINT, SPLIT = "joint", "split"
PLENTY = 1e18


@contextmanager
def grouping(*pattern: str) -> Iterator[list[tuple[int, list[int]]]]:
    """Free memory is plenty or nothing, by turns from one evaluation of the sampler to the next.

    Yields:
        For every model call: the evaluation and ``cond_or_uncond``.
    """
    calls: list[tuple[int, list[int]]] = []
    evaluation, predicting = -1, False
    # Whom the core asks depends on the version: the MODEL, before that the module.
    patcher = comfy.model_patcher.ModelPatcher
    asked = patcher if hasattr(patcher, "get_free_memory") else comfy.model_management
    arguments = 2 if asked is patcher else 1
    true_memory = asked.get_free_memory
    calc, apply = comfy.samplers._calc_cond_batch, comfy.model_base.BaseModel._apply_model

    def count_evaluations(*args, **kwargs):
        nonlocal evaluation, predicting
        evaluation, predicting = evaluation + 1, True
        try:
            return calc(*args, **kwargs)
        finally:
            predicting = False

    def free_memory(*args, **kwargs):
        # Attention asks too, within a prediction: for more than a number.
        if not predicting or kwargs or len(args) > arguments:
            return true_memory(*args, **kwargs)
        return PLENTY if pattern[evaluation % len(pattern)] == JOINT else 0

    @wraps(apply)
    def note_call(self, *args, **kwargs):
        options = kwargs.get("transformer_options") or args[5]
        calls.append((evaluation, list(options["cond_or_uncond"])))
        return apply(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.samplers, "_calc_cond_batch", count_evaluations)
        patch.setattr(asked, "get_free_memory", free_memory)
        patch.setattr(comfy.model_base.BaseModel, "_apply_model", note_call)
        yield calls
