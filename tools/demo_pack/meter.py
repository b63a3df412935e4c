"""What one sampling run costs: seconds of every step, or its FLOPs and tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

KEY = "toma_demo_meter"


def attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of attention from the shapes of its inputs."""
    return sdpa_flop_count(query, key, value)


# torch counts the fused attention of GPUs, but not that of the CPU
UNCOUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


class Meter:
    """Measures each step of one run: a step is one prediction with all its conditions.

    It never counts while it takes the time, since counting costs time.
    """

    def __init__(self, count: bool) -> None:
        self.count = count
        self.seconds: list[float] = []
        self.flops: list[int] = []
        self.tokens: list[int] = []  # image tokens entering a block, over all blocks and calls

    def __call__(self, executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The wrapper around one step."""
        if self.count:
            counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
            with self._counting_tokens(executor.class_obj.inner_model.diffusion_model), counter:
                result = executor(*args, **kwargs)
            self.flops.append(counter.get_total_flops())
            return result
        finish()
        start = time.perf_counter()
        result = executor(*args, **kwargs)
        finish()
        self.seconds.append(time.perf_counter() - start)
        return result

    @contextlib.contextmanager
    def _counting_tokens(self, flux: Any) -> Iterator[None]:
        """Note how many image tokens enter the first layer of every block."""
        text = 0

        def enter_text(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            nonlocal text
            text = inputs[0].shape[1]

        def enter_double(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            self.tokens.append(inputs[0].shape[1])

        def enter_single(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            self.tokens.append(inputs[0].shape[1] - text)  # text and image in one sequence

        hooks = [flux.txt_in.register_forward_pre_hook(enter_text)]
        for block in flux.double_blocks:
            hooks.append(block.img_attn.qkv.register_forward_pre_hook(enter_double))
        for block in flux.single_blocks:
            hooks.append(block.linear1.register_forward_pre_hook(enter_single))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def finish() -> None:
    """Wait for the work that an accelerator has queued, so that the clock sees it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


class ToMADemoMeter:
    """Puts a meter on a model. `run` is there to differ: ComfyUI repeats no run it knows."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "attach"
    CATEGORY = "ToMA demo"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "run": ("INT", {"default": 0, "min": 0}),
                "count": ("BOOLEAN", {"tooltip": "Count FLOPs and tokens, or take the time."}),
            }
        }

    def attach(self, model: Any, run: int, count: bool) -> tuple[Any]:
        metered = model.clone()
        meter = Meter(count)
        metered.set_attachments(KEY, meter)
        metered.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, meter)
        return (metered,)


class ToMADemoReport:
    """Sends what the meter of `model` saw to the client, after the run that gave `latent`."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "report"
    CATEGORY = "ToMA demo"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "latent": ("LATENT",)}}

    def report(self, model: Any, latent: Any) -> dict[str, Any]:
        meter = model.get_attachment(KEY)
        names = ("seconds", "flops", "tokens")
        return {"ui": {KEY: [{name: getattr(meter, name) for name in names}]}}
