"""Other nodes beside ours: the core's own where ComfyUI ships them, faithful doubles where not.

A double installs the same patch as the pack that it stands for and is named after what it does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.ldm.flux.controlnet
import comfy.ldm.flux.layers
import comfy.ops
import small
import tiny
import torch
from comfy.ldm.modules.attention import BasicTransformerBlock, optimized_attention
from comfy.patcher_extension import WrappersMP

SIZE = (8, 16)
PLACES = [("input", 3), ("input", 5), ("middle", 0), *[("output", i) for i in range(4)]]
"""Where the smallest SDXL attends."""


def run_node(module: str, name: str, **inputs: Any) -> Any:
    """First output of a core node, of either node API."""
    node = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
    if hasattr(node, "execute"):
        result = node.execute(**inputs)
    else:
        result = getattr(node(), node.FUNCTION)(**inputs)
    return (result if isinstance(result, tuple) else result.result)[0]


def exists(module: str) -> bool:
    return importlib.util.find_spec(f"comfy_extras.{module}") is not None


@dataclass
class Neighbour:
    """Another node.

    Attributes:
        patch: puts it into a MODEL and counts its calls in the list.
        condition: puts it into a CONDITIONING, for nodes that work there.
        identity: it changes nothing, so the image must be ours alone.
        like_scope: scope of ours alone that an identity must equal, where ours gives way.
        steps: sampling steps at which its effect shows.
        sampling: further arguments of the sampling run.
    """

    patch: Callable[[Any, list], Any] = lambda model, calls: model
    condition: Callable[[Any, list, list], list] = lambda model, conditioning, calls: conditioning
    identity: bool = False
    like_scope: str | None = None
    steps: int = 3
    sampling: dict[str, Any] = field(default_factory=dict)


def _core(module: str, name: str, **inputs: Any) -> Callable[[Any, list], Any]:
    return lambda model, calls: run_node(module, name, model=model, **inputs)


def _lora(model: Any, calls: list) -> Any:
    """Weight patches as LoraLoader adds them."""
    model = model.clone()
    generator = torch.Generator().manual_seed(8)
    patches = {}
    for key, weight in model.model.state_dict().items():
        if key.endswith(("attn1.to_q.weight", "ff.net.2.weight", "img_attn.qkv.weight")) or (
            key.endswith("linear2.weight")
        ):
            patches[key] = ("diff", (0.05 * torch.randn(weight.shape, generator=generator),))
    assert len(model.add_patches(patches, 1.0)) == len(patches) > 0
    return model


def _model_option(key: str, make: Callable[[list], Any]) -> Callable[[Any, list], Any]:
    def patch(model: Any, calls: list) -> Any:
        model = model.clone()
        model.model_options["transformer_options"][key] = make(calls)
        return model

    return patch


def _attention_override(calls: list) -> Callable:
    """Another attention function, as SageAttention nodes install it; here the same one."""

    def attention(function: Callable, *args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape)
        return function(*args, **kwargs)

    return attention


def _attn1_patch(change: float) -> Callable[[Any, list], Any]:
    """A patch at the entry of self-attention; 0 leaves queries, keys and values alone.

    The UNet passes and wants three tensors, Flux keywords and a dict.
    """

    def patch(model: Any, calls: list) -> Any:
        def attn1(q: Any, k: Any, v: Any, extra_options: Any, **kwargs: Any) -> Any:
            calls.append(q.shape)
            v = v if not change else v * (1 + change)
            return {"q": q, "k": k, "v": v} if kwargs else (q, k, v)

        model = model.clone()
        model.set_model_attn1_patch(attn1)
        return model

    return patch


def _attn2_patch(change: float) -> Callable[[Any, list], Any]:
    """A patch at the entry of cross-attention."""

    def patch(model: Any, calls: list) -> Any:
        def attn2(q: Any, k: Any, v: Any, extra_options: Any) -> Any:
            calls.append(q.shape)
            return q, k, v if not change else v * (1 + change)

        model = model.clone()
        model.set_model_attn2_patch(attn2)
        return model

    return patch


def _perturbed_everywhere(model: Any, calls: list) -> Any:
    """Replaces self-attention by its values in every block, with full-length output."""

    def values(q: Any, k: Any, v: Any, extra_options: Any) -> Any:
        calls.append(v.shape)
        return v

    model = model.clone()
    for place in PLACES[::2]:
        model.set_model_attn1_replace(values, *place)
    return model


def _whole_grid(extra_options: dict, tokens: int) -> tuple[int, int]:
    """Rows and columns of the block; fails like the real pack where tokens are missing."""
    rows, columns = extra_options["activations_shape"][-2:]
    if rows * columns != tokens:
        raise RuntimeError(f"the mask has {rows * columns} tokens, the block {tokens}")
    return rows, columns


def _picture_prompt(masked: bool) -> Callable[[Any, list], Any]:
    """Cross-attention to picture tokens besides, as IPAdapter installs it, with or without mask.

    Its mask follows the grid of the block in token order.
    """

    def patch(model: Any, calls: list) -> Any:
        generator = torch.Generator().manual_seed(9)
        mask = (torch.rand(1, 1, 24, 24, generator=generator) > 0.5).float()
        picture: dict[int, Any] = {}

        def attn2(q: Any, k: Any, v: Any, extra_options: Any) -> Any:
            calls.append(q.shape)
            heads, width = extra_options["n_heads"], k.shape[-1]
            if width not in picture:
                picture[width] = torch.randn(1, 4, width, generator=generator)
            own = picture[width].to(q).expand(q.shape[0], -1, -1)
            added = optimized_attention(q, own, own, heads)
            rows, columns = _whole_grid(extra_options, q.shape[1])
            if masked:
                small = torch.nn.functional.interpolate(mask, (rows, columns), mode="bilinear")
                added = added * small.reshape(1, -1, 1)
            return optimized_attention(q, k, v, heads) + added

        model = model.clone()
        for place in PLACES:
            model.set_model_attn2_replace(attn2, *place)
        return model

    return patch


def _grounding(model: Any, conditioning: list, calls: list) -> list:
    """A patch between self- and cross-attention that comes with a prompt, as GLIGEN's does."""

    class Boxes(torch.nn.Linear):
        """Has the method that ComfyUI asks a GLIGEN model for."""

        def set_position(self, latent_shape: Any, boxes: Any, device: Any) -> Callable:
            def middle(x: Any, extra_options: Any) -> Any:
                calls.append(x.shape)
                rows, columns = _whole_grid(extra_options, x.shape[1])
                inside = torch.zeros(1, rows, columns, 1)
                inside[:, : rows // 2, : columns // 2] = 0.1
                return x + inside.reshape(1, -1, 1).to(x)

            return middle

    gligen = ("position", tiny.wrap(Boxes(1, 1)), [(torch.zeros(1, 8), 4, 4, 0, 0)])
    return [[text, {**options, "gligen": gligen}] for text, options in conditioning]


def _skip_layers(calls_original: bool) -> Callable[[Any, list], Any]:
    """A replacement of Flux blocks: one that calls the block within, or one that leaves it out."""

    def patch(model: Any, calls: list) -> Any:
        def replace(args: dict, extra: dict) -> dict:
            calls.append(args["img"].shape)
            out = dict(extra["original_block"](args)) if calls_original else dict(args)
            return {key: out[key] for key in ("img", "txt") if key in out}

        model = model.clone()
        model.set_model_patch_replace(replace, "dit", "double_block", 1)
        model.set_model_patch_replace(replace, "dit", "single_block", 0)
        return model

    return patch


def _longer_text(model: Any, calls: list) -> Any:
    """A Flux block replacement that adds tokens of its own to the text for one block."""

    def replace(args: dict, extra: dict) -> dict:
        calls.append(args["img"].shape)
        text = args["txt"].shape[1]
        longer = torch.cat((args["txt"], args["txt"][:, :2]), 1)
        pe = torch.cat((args["pe"][:, :, :2], args["pe"]), 2)
        out = extra["original_block"]({**args, "txt": longer, "pe": pe})
        return {"img": out["img"], "txt": out["txt"][:, :text]}

    model = model.clone()
    model.set_model_patch_replace(replace, "dit", "double_block", 0)
    return model


def _object_patch(model: Any, calls: list) -> Any:
    """Another pack's forward in place of a block's own, installed as an object patch."""
    model = model.clone()
    if tiny.is_flux(model):
        path, kind = "double_blocks.0", comfy.ldm.flux.layers.DoubleStreamBlock
    else:
        path, kind = "middle_block.1.transformer_blocks.0", BasicTransformerBlock
    block = model.get_model_object(f"diffusion_model.{path}")

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(path)
        return kind.forward(block, *args, **kwargs)

    model.add_object_patch(f"diffusion_model.{path}.forward", forward)
    return model


def _tiles(model: Any, calls: list) -> Any:
    """Runs the model on the left and the right half by themselves, as tiled samplers do."""

    def halves(apply_model: Callable, parameters: dict) -> Any:
        x, c = parameters["input"], parameters["c"]
        half = x.shape[-1] // 2
        parts = []
        for part in (x[..., :half], x[..., half:]):
            calls.append(part.shape)
            parts.append(apply_model(part, parameters["timestep"], **c))
        return torch.cat(parts, -1)

    model = model.clone()
    model.set_model_unet_function_wrapper(halves)
    return model


def _function_wrapper(model: Any, calls: list) -> Any:
    """A wrapper around the model function that only looks on."""

    def watch(apply_model: Callable, parameters: dict) -> Any:
        calls.append(parameters["input"].shape)
        return apply_model(parameters["input"], parameters["timestep"], **parameters["c"])

    model = model.clone()
    model.set_model_unet_function_wrapper(watch)
    return model


def _diffusion_wrapper(model: Any, calls: list) -> Any:
    """A wrapper of the diffusion model that scales its output, as cache packs hang in."""

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape)
        return 1.01 * executor(*args, **kwargs)

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another pack", wrapper)
    return model


@functools.cache
def control_net(is_flux: bool) -> Any:
    """A tiny control net of ComfyUI's own classes, for a UNet or for Flux (as XLabs')."""
    operations = comfy.ops.disable_weight_init
    common = {"dtype": torch.float32, "operations": operations}
    if is_flux:
        config = dict(tiny.flux_config().unet_config)
        for key in ("image_model", "dtype"):
            config.pop(key, None)
        config["depth_single_blocks"] = 0
        net = comfy.ldm.flux.controlnet.ControlNetFlux(**config, **common)
    else:
        config = dict(small.sdxl().model.model_config.unet_config)
        for key in ("out_channels", "transformer_depth_output", "dtype", "use_temporal_attention"):
            config.pop(key, None)
        net = comfy.cldm.cldm.ControlNet(hint_channels=3, **config, **common)
    tiny.initialise(net, 7)
    net.requires_grad_(False)
    return comfy.controlnet.ControlNet(net.eval(), load_device=torch.device("cpu"))


def _control(model: Any, conditioning: list, calls: list) -> list:
    """ControlNetApplyAdvanced with a tiny control net."""
    from nodes import ControlNetApplyAdvanced

    net = control_net(tiny.is_flux(model)).copy()
    get_control = net.get_control

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape)
        return get_control(*args, **kwargs)

    net.get_control = counted
    image = torch.rand(1, SIZE[0] * 8, SIZE[1] * 8, 3, generator=torch.Generator().manual_seed(6))
    return ControlNetApplyAdvanced().apply_controlnet(
        conditioning, conditioning, net, image, 0.3, 0.0, 1.0
    )[0]


def _with(**options: Any) -> Callable[[Any, list, list], list]:
    return lambda model, conditioning, calls: [
        [text, {**own, **options}] for text, own in conditioning
    ]


def _left_half(model: Any, conditioning: list, calls: list) -> list:
    """ConditioningSetArea and a whole condition beside it."""
    half = {"area": (SIZE[0], SIZE[1] // 2, 0, 0), "strength": 1.0, "set_area_to_bounds": False}
    return [*conditioning, *tiny.conditioning(model, 6, **half)]


def _masked(model: Any, conditioning: list, calls: list) -> list:
    """ConditioningSetMask and a whole condition beside it."""
    mask = torch.zeros(1, *SIZE)
    mask[:, 3:9, 2:7] = 1
    return [*conditioning, *tiny.conditioning(model, 6, mask=mask, mask_strength=1.0)]


def _regional(model: Any, conditioning: list, calls: list) -> list:
    """Attention masks of regions on Flux: half the picture does not see the text."""
    text, rows, columns = conditioning[0][0].shape[1], SIZE[0] // 2, SIZE[1] // 2
    mask = torch.zeros(1, text + rows * columns, text + rows * columns)
    left = (torch.arange(rows * columns) % columns < columns // 2).nonzero().squeeze(1) + text
    mask[:, left[:, None], torch.arange(text)] = -1e4
    return _with(attention_mask=mask, attention_mask_img_shape=(rows, columns))(
        model, conditioning, calls
    )


def _references(method: str) -> Callable[[Any, list, list], list]:
    """ReferenceLatent with two pictures of sizes of their own, as Kontext takes them."""
    generator = torch.Generator().manual_seed(5)
    pictures = [torch.randn(1, 16, *size, generator=generator) for size in ((9, 13), SIZE)]
    return _with(reference_latents=pictures, reference_latents_method=method)


def _unet() -> dict[str, Neighbour]:
    known = {
        "LoRA": Neighbour(_lora),
        "ControlNet": Neighbour(condition=_control),
        "picture prompt": Neighbour(_picture_prompt(masked=False)),
        "masked picture prompt": Neighbour(_picture_prompt(masked=True)),
        "PerturbedAttentionGuidance": Neighbour(
            _core("nodes_pag", "PerturbedAttentionGuidance", scale=3.0)
        ),
        "values for attention": Neighbour(_perturbed_everywhere),
        "SelfAttentionGuidance": Neighbour(
            _core("nodes_sag", "SelfAttentionGuidance", scale=0.5, blur_sigma=2.0)
        ),
        "FreeU": Neighbour(_core("nodes_freelunch", "FreeU", b1=1.1, b2=1.2, s1=0.9, s2=0.2)),
        "FreeU_V2": Neighbour(_core("nodes_freelunch", "FreeU_V2", b1=1.3, b2=1.4, s1=0.9, s2=0.2)),
        "HyperTile": Neighbour(
            _core(
                *("nodes_hypertile", "HyperTile"),
                tile_size=8,
                swap_size=1,
                max_depth=2,
                scale_depth=False,
            )
        ),
        "deep shrink": Neighbour(
            _core(
                *("nodes_model_downscale", "PatchModelAddDownscale"),
                block_number=3,
                downscale_factor=1.5,
                start_percent=0.0,
                end_percent=0.35,
                downscale_after_skip=True,
                downscale_method="bicubic",
                upscale_method="bicubic",
            )
        ),
        "grounding": Neighbour(condition=_grounding),
        "attention entry": Neighbour(_attn1_patch(0.1)),
        "attention entry, looking on": Neighbour(
            _attn1_patch(0.0), identity=True, like_scope="modules"
        ),
        "cross-attention entry": Neighbour(_attn2_patch(0.1)),
        "cross-attention entry, looking on": Neighbour(
            _attn2_patch(0.0), identity=True, like_scope="modules"
        ),
    }
    return {**known, **_either()}


def _flux() -> dict[str, Neighbour]:
    known = {
        "LoRA": Neighbour(_lora),
        "ControlNet": Neighbour(condition=_control),
        "block replacement": Neighbour(_skip_layers(calls_original=True), identity=True),
        "block left out": Neighbour(_skip_layers(calls_original=False)),
        "block with longer text": Neighbour(_longer_text),
        "regional masks": Neighbour(condition=_regional),
        "SkipLayerGuidance": Neighbour(
            _core(
                *("nodes_slg", "SkipLayerGuidanceDiT"),
                double_layers="0",
                single_layers="1",
                scale=3.0,
                start_percent=0.0,
                end_percent=1.0,
            )
        ),
    }
    # Flux.1 itself fails with the fourth method, "index_timestep_zero": it is made for Flux.2.
    for method in ("offset", "index", "uxo"):
        known[f"references, {method}"] = Neighbour(condition=_references(method))
    if "attn1_patch" in inspect.getsource(comfy.ldm.flux.layers.DoubleStreamBlock):
        known["attention entry"] = Neighbour(_attn1_patch(0.1))
    return {**known, **_either()}


def _either() -> dict[str, Neighbour]:
    """Neighbours that work on any model."""
    known = {
        "attention override": Neighbour(
            _model_option("optimized_attention_override", _attention_override), identity=True
        ),
        "EasyCache": Neighbour(
            _core(
                *("nodes_easycache", "EasyCacheNode"),
                reuse_threshold=3.0,
                start_percent=0.0,
                end_percent=1.0,
                verbose=False,
            ),
            steps=6,
        ),
        "LazyCache": Neighbour(
            _core(
                *("nodes_easycache", "LazyCacheNode"),
                reuse_threshold=3.0,
                start_percent=0.0,
                end_percent=1.0,
                verbose=False,
            ),
            steps=6,
        ),
        "area": Neighbour(condition=_left_half),
        "mask": Neighbour(condition=_masked),
        "tiles": Neighbour(_tiles),
        "model function, looking on": Neighbour(_function_wrapper, identity=True),
        "diffusion wrapper": Neighbour(_diffusion_wrapper),
        "object patch": Neighbour(_object_patch, identity=True),
    }
    if exists("nodes_nag"):
        known["NAGuidance"] = Neighbour(
            _core("nodes_nag", "NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5),
            sampling={"cfg": 4.0},
        )
    return known


NEIGHBOURS: dict[str, dict[str, Neighbour]] = {"sdxl": _unet(), "flux": _flux()}
