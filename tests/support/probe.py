"""Sees what a model does: tokens entering modules, FLOPs of one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import comfy.model_base
import comfy.supported_models
import tiny
import torch
from comfy.ldm.modules.attention import BasicTransformerBlock, attention_pytorch
from comfyui_toma.nodes.attach import attach, open_run
from torch.utils.flop_counter import FlopCounterMode


@contextmanager
def token_spy(model: Any) -> Iterator[dict[str, list[int]]]:
    """Tokens that attention and feed-forward of every block work on, call by call, by name.

    In a Flux single block the attention and feed-forward share ``linear1``, text included.
    """
    seen: dict[str, list[int]] = {}
    handles = []
    for name, module in model.model.diffusion_model.named_modules():
        parts: dict[str, Any] = {}
        if isinstance(module, BasicTransformerBlock):
            parts = {"attn1": module.attn1.to_q, "attn2": module.attn2.to_q, "ff": module.ff.net[0]}
        elif hasattr(module, "img_attn"):
            parts = {"attn": module.img_attn.qkv, "ff": module.img_mlp[0]}
        elif hasattr(module, "linear1"):
            parts = {"attn+ff": module.linear1}
        for part, inner in parts.items():
            tokens = seen[f"{name}.{part}"] = []
            handles.append(
                inner.register_forward_hook(
                    lambda _, inputs, output, tokens=tokens: tokens.append(output.shape[1])
                )
            )
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def full_sdxl_on_meta() -> Any:
    """The full SDXL UNet without memory: shapes only."""
    config = comfy.supported_models.SDXL(
        tiny.sdxl_config(
            model_channels=320,
            transformer_depth=[0, 0, 2, 2, 10, 10],
            transformer_depth_middle=10,
            transformer_depth_output=[0, 0, 0, 2, 2, 2, 10, 10, 10],
            num_head_channels=64,
            context_dim=2048,
            dtype=torch.bfloat16,
        )
    )
    return _on_meta(config)


def full_flux_on_meta(double: int = 19, single: int = 38) -> Any:
    """The full Flux-dev transformer, or fewer of its blocks, without memory: shapes only."""
    config = tiny.flux_config(
        guidance=True,
        hidden_size=3072,
        num_heads=24,
        context_in_dim=4096,
        vec_in_dim=768,
        depth=double,
        depth_single_blocks=single,
    )
    config.unet_config["dtype"] = torch.bfloat16
    return _on_meta(config)


def _on_meta(config: Any) -> Any:
    model = config.get_model({}, "", device=torch.device("meta"))
    model.model_sampling.to("meta")
    return tiny.wrap(model)


class Cost(NamedTuple):
    """What a call takes.

    Attributes:
        tflop: of the call, our own work included.
        kept_mib: detail kept after it.
        saving: FLOPs of all calls so far without merging, over what they were, as the node says.
    """

    tflop: float
    kept_mib: float
    saving: float = 1.0


def count_flops(model: Any, config: Any, latent: tuple[int, int]) -> float:
    """TFLOP of the first call of a run at batch 1."""
    return cost(model, config, latent).tflop


def cost(model: Any, config: Any, latent: tuple[int, int], call: int = 1) -> Cost:
    """Cost of the first call of a run at batch 1 in bf16, or of a later one."""
    patched = attach(model, config)
    sigmas = torch.tensor([1.0, 0.5, 0.0])
    run, options = open_run(patched, patched.model_options, sigmas, latent)
    is_flux = tiny.is_flux(model)
    dtype = torch.bfloat16
    x = torch.empty(1, 16 if is_flux else 4, *latent, device="meta")
    arguments = {
        "c_crossattn": torch.empty(1, 512 if is_flux else 77, 4096 if is_flux else 2048),
        "y": torch.empty(1, 768 if is_flux else 2816),
    }
    if is_flux:
        arguments["guidance"] = torch.empty(1)
    arguments = {key: value.to("meta", dtype) for key, value in arguments.items()}

    def sdpa(function, *args, **kwargs):
        """Attention in the form that the FLOP counter knows."""
        return attention_pytorch(*args, **kwargs)

    transformer_options = {
        **options["transformer_options"],
        "sigmas": sigmas[:1],
        "sample_sigmas": sigmas,
        "cond_or_uncond": [0],
        "uuids": ["condition"],
        "optimized_attention_override": sdpa,
    }

    def predict() -> None:
        model.model.apply_model(
            x, sigmas[:1].to("meta"), transformer_options=transformer_options, **arguments
        )

    for _ in range(call):
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            run.calc_cond_batch(predict)
    kept = sum(each.session.kept_bytes for each in run._runs)
    saving = run._runs[0].report.saving if run._runs else 1.0
    run.close()
    return Cost(counter.get_total_flops() / 1e12, kept / 2**20, saving)
