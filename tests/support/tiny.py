"""Tiny models of ComfyUI's own classes, and runs through ComfyUI's own sampling code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.samplers
import comfy.supported_models
import torch
from comfy.ldm.flux.model import FluxParams
from torch import Tensor

CONTEXT = 64
POOLED = 1280
FLUX_POOLED = 32


def initialise(module: torch.nn.Module, seed: int = 0) -> None:
    """Reproducible weights at which every layer keeps the scale of its input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                value /= parameter[0].numel() ** 0.5
            elif name.endswith("weight") or name.endswith("scale"):
                value = 1 + 0.1 * value
            else:
                value *= 0.1
            parameter.copy_(value.to(parameter.dtype))


def sdxl_config(**changes: Any) -> dict[str, Any]:
    """A UNet configuration with the shape of SDXL and few channels."""
    config = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": 32,
        "num_res_blocks": [2, 2, 2],
        "channel_mult": [1, 2, 4],
        "transformer_depth": [0, 0, 1, 1, 2, 2],
        "transformer_depth_middle": 2,
        "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2],
        "num_head_channels": 32,
        "num_classes": "sequential",
        "adm_in_channels": POOLED + 6 * 256,
        "context_dim": CONTEXT,
        "use_spatial_transformer": True,
        "use_linear_in_transformer": True,
        "use_checkpoint": False,
        "use_temporal_attention": False,
        "legacy": False,
    }
    return {**config, **changes}


def patcher(config: Any, dtype: torch.dtype, seed: int = 0) -> comfy.model_patcher.ModelPatcher:
    """A MODEL of a ``comfy.supported_models`` configuration with random weights."""
    config.unet_config["dtype"] = dtype
    model = config.get_model({}, "")
    initialise(model.diffusion_model, seed)
    return wrap(model)


def wrap(model: Any) -> comfy.model_patcher.ModelPatcher:
    device = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


def sdxl(dtype: torch.dtype = torch.float32, **changes: Any) -> comfy.model_patcher.ModelPatcher:
    return patcher(comfy.supported_models.SDXL(sdxl_config(**changes)), dtype)


def sd15(dtype: torch.dtype = torch.float32, **changes: Any) -> comfy.model_patcher.ModelPatcher:
    config = sdxl_config(
        num_res_blocks=[1, 1, 1, 1],
        channel_mult=[1, 2, 4, 4],
        transformer_depth=[1, 1, 1, 0],
        transformer_depth_middle=1,
        transformer_depth_output=[1, 1, 1, 1, 1, 1, 0, 0],
        num_head_channels=-1,
        num_heads=4,
        use_linear_in_transformer=False,
        num_classes=None,
    )
    del config["adm_in_channels"]
    return patcher(comfy.supported_models.SD15({**config, **changes}), dtype)


def flux_config(guidance: bool = False, **changes: Any) -> Any:
    """Flux-schnell, or Flux-dev with ``guidance``, of two double and three single blocks."""
    config = {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "hidden_size": 128,
        "num_heads": 1,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
        "guidance_embed": guidance,
        "context_in_dim": CONTEXT,
        "vec_in_dim": FLUX_POOLED,
        "depth": 2,
        "depth_single_blocks": 3,
        **changes,
    }
    if "txt_ids_dims" in FluxParams.__dataclass_fields__:
        config["txt_ids_dims"] = []
    kind = comfy.supported_models.Flux if guidance else comfy.supported_models.FluxSchnell
    return kind(config)


def flux(dtype: torch.dtype = torch.float32, **changes: Any) -> comfy.model_patcher.ModelPatcher:
    return patcher(flux_config(**changes), dtype)


def is_flux(model: comfy.model_patcher.ModelPatcher) -> bool:
    return hasattr(model.model.diffusion_model, "double_blocks")


def conditioning(
    model: comfy.model_patcher.ModelPatcher, seed: int = 1, tokens: int = 7, **extra: Any
) -> list:
    """A CONDITIONING with random text embeddings, as CLIPTextEncode would return it."""
    generator = torch.Generator().manual_seed(seed)
    pooled = FLUX_POOLED if is_flux(model) else POOLED
    return [
        [
            torch.randn(1, tokens, CONTEXT, generator=generator),
            {"pooled_output": torch.randn(1, pooled, generator=generator), **extra},
        ]
    ]


def noise_for(
    model: comfy.model_patcher.ModelPatcher, height: int, width: int, batch: int = 1, seed: int = 3
) -> Tensor:
    """Noise of ``height`` x ``width`` latent pixels; sample i never depends on the batch."""
    channels = 16 if is_flux(model) else 4
    return torch.cat(
        [
            torch.randn(
                1, channels, height, width, generator=torch.Generator().manual_seed(seed + i)
            )
            for i in range(batch)
        ]
    )


def sample(
    model: comfy.model_patcher.ModelPatcher,
    height: int = 16,
    width: int = 16,
    *,
    noise: Tensor | None = None,
    steps: int = 3,
    cfg: float | None = None,
    sampler: str = "euler",
    scheduler: str = "normal",
    positive: list | None = None,
    negative: list | None = None,
    denoise: float = 1.0,
    callback: Callable | None = None,
    batch: int = 1,
    **options: Any,
) -> Tensor:
    """One sampling run through ``comfy.sample.sample``."""
    noise = noise_for(model, height, width, batch) if noise is None else noise
    cfg = (1.0 if is_flux(model) else 7.0) if cfg is None else cfg
    return comfy.sample.sample(
        model,
        noise,
        steps,
        cfg,
        sampler,
        scheduler,
        positive or conditioning(model, 1),
        negative or conditioning(model, 2),
        options.pop("latent", torch.zeros_like(noise)),
        denoise=denoise,
        callback=callback,
        disable_pbar=True,
        seed=5,
        **options,
    )
