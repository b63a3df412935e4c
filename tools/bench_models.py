"""ComfyUI's own SDXL and Flux with random weights, at full or tiny size, and calls of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from bench_host import load_host
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Which model: its kind and how large.

    Attributes:
        kind: "sdxl" or "flux".
        tiny: a model of the same classes with few channels, to try the tools themselves.
        double, single: blocks of a Flux model.
    """

    kind: str
    tiny: bool = False
    double: int = 19
    single: int = 38

    @property
    def name(self) -> str:
        """For people: a Flux that is not whole says how many blocks it has."""
        if self.kind == "flux" and (self.double, self.single) != (19, 38):
            return f"flux {self.double}+{self.single}"
        return self.kind

    @property
    def text(self) -> tuple[int, int, int]:
        """Text tokens, their channels and those of the pooled text."""
        if self.tiny:
            return 7, 64, 32 if self.kind == "flux" else 2816
        return (512, 4096, 768) if self.kind == "flux" else (77, 2048, 2816)


def build(shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A MODEL (`ModelPatcher`) with random weights; on "meta" it has shapes only."""
    load_host()
    import comfy.model_patcher

    config = (_flux_config if shape.kind == "flux" else _sdxl_config)(shape)
    config.unet_config["dtype"] = dtype
    model = config.get_model({}, "", device=torch.device(device)).eval().requires_grad_(False)
    model.to(device)
    if device != "meta":
        _randomise(model.diffusion_model)
    place = torch.device(device)
    return comfy.model_patcher.ModelPatcher(model, load_device=place, offload_device=place)


def compiled(model: Any) -> Any:
    """The MODEL behind ComfyUI's node TorchCompileModel, with inductor."""
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    output = TorchCompileModel.execute(model, "inductor")
    return getattr(output, "args", output)[0]


def _sdxl_config(shape: Shape) -> Any:
    import comfy.supported_models

    _, context, pooled = shape.text
    depths = [1, 1, 2, 2] if shape.tiny else [2, 2, 10, 10]
    return comfy.supported_models.SDXL(
        {
            "image_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "model_channels": 32 if shape.tiny else 320,
            "num_res_blocks": [2, 2, 2],
            "channel_mult": [1, 2, 4],
            "transformer_depth": [0, 0, *depths],
            "transformer_depth_middle": depths[-1],
            "transformer_depth_output": [0] * 3 + [depths[0]] * 3 + [depths[-1]] * 3,
            "num_head_channels": 32 if shape.tiny else 64,
            "num_classes": "sequential",
            "adm_in_channels": pooled,
            "context_dim": context,
            "use_spatial_transformer": True,
            "use_linear_in_transformer": True,
            "use_checkpoint": False,
            "use_temporal_attention": False,
            "legacy": False,
        }
    )


def _flux_config(shape: Shape) -> Any:
    import comfy.supported_models
    from comfy.ldm.flux.model import FluxParams

    _, context, pooled = shape.text
    config = {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "hidden_size": 128 if shape.tiny else 3072,
        "num_heads": 1 if shape.tiny else 24,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
        "guidance_embed": True,
        "context_in_dim": context,
        "vec_in_dim": pooled,
        "depth": shape.double,
        "depth_single_blocks": shape.single,
    }
    if "txt_ids_dims" in FluxParams.__dataclass_fields__:
        config["txt_ids_dims"] = []
    return comfy.supported_models.Flux(config)


def _randomise(module: torch.nn.Module) -> None:
    """Weights at which every layer keeps about the scale of its input, made in seconds.

    One block of noise is laid over all parameters; its length is prime, so that no rows repeat.
    """
    first = next(module.parameters())
    noise = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    noise = noise.to(first.device, first.dtype)
    for name, parameter in module.named_parameters():
        flat = parameter.data.view(-1)
        for start in range(0, len(flat), len(noise)):
            flat[start : start + len(noise)] = noise[: len(flat) - start]
        if parameter.ndim > 1:
            parameter.data.div_(parameter[0].numel() ** 0.5)
        else:
            is_scale = name.endswith(("weight", "scale"))
            parameter.data.mul_(0.1).add_(1.0 if is_scale else 0.0)


@dataclass(frozen=True)
class Work:
    """A model and the arguments of one call of it.

    Attributes:
        size: side of the picture, in pixels.
        batch: samples; each is a condition of its own, as under classifier-free guidance.
    """

    shape: Shape
    size: int
    batch: int
    model: Any
    x: Tensor
    arguments: dict[str, Tensor]

    def call(self, options: dict[str, Any], sigma: Tensor, sigmas: Tensor, **more: Any) -> Tensor:
        """One prediction at noise level `sigma` ``(1,)`` under model options."""
        transformer_options = {
            **options.get("transformer_options", {}),
            "sigmas": sigma,
            "sample_sigmas": sigmas,
            "cond_or_uncond": list(range(self.batch)),
            "uuids": [f"condition {sample}" for sample in range(self.batch)],
            **more,
        }
        # No copy from the host: a CUDA graph could not hold one.
        times = torch.full((self.batch,), float(sigma), device=self.x.device)
        return self.model.model.apply_model(
            self.x, times, transformer_options=transformer_options, **self.arguments
        )


def make_work(shape: Shape, model: Any, size: int, batch: int) -> Work:
    """Random inputs for `model`; on "meta" where the model is."""
    parameter = next(model.model.diffusion_model.parameters())
    generator = torch.Generator().manual_seed(1)
    latent = (16 if shape.kind == "flux" else 4, size // 8, size // 8)
    tokens, context, pooled = shape.text

    def noise(*sizes: int) -> Tensor:
        return torch.randn(batch, *sizes, generator=generator).to(parameter.device)

    arguments = {"c_crossattn": noise(tokens, context), "y": noise(pooled)}
    if shape.kind == "flux":
        arguments["guidance"] = torch.full((batch,), 3.5, device=parameter.device)
    arguments = {key: value.to(parameter.dtype) for key, value in arguments.items()}
    return Work(shape, size, batch, model, noise(*latent), arguments)
