"""The example graphs, in ComfyUI's API format: what is connected, what differs from the defaults.

A link is `[node, output]`. `python tools examples` builds them in ComfyUI's own page, which adds
all other values, and saves them in `example_workflows`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

Graph = dict[str, dict[str, Any]]

PROMPT = "a lighthouse on a cliff at dusk, waves breaking below, detailed, wide view"
AVOID = "blurry, low quality, text, watermark"
SEED = 42

FREE_SEED = {"seed": SEED, "control_after_generate": "fixed"}
SDXL_STEPS = {
    **FREE_SEED,
    "steps": 30,
    "cfg": 6.5,
    "sampler_name": "dpmpp_2m",
    "scheduler": "karras",
}
FLUX_STEPS = {**FREE_SEED, "steps": 20, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}


def node(kind: str, title: str | None = None, **inputs: Any) -> dict[str, Any]:
    """One node; a title only where it says more than the node's own name."""
    return {"class_type": kind, "inputs": inputs, **({"_meta": {"title": title}} if title else {})}


def sdxl(between: Graph, clip: str = "checkpoint") -> Graph:
    """From checkpoint to picture; `between` holds the node `toma`, whose model is sampled."""
    return {
        "checkpoint": node("CheckpointLoaderSimple", ckpt_name="sd_xl_base_1.0.safetensors"),
        **between,
        "prompt": node("CLIPTextEncode", "Prompt", clip=[clip, 1], text=PROMPT),
        "avoid": node("CLIPTextEncode", "Negative prompt", clip=[clip, 1], text=AVOID),
        "latent": node("EmptyLatentImage", width=1024, height=1024),
        "sampler": node(
            "KSampler",
            model=["toma", 0],
            positive=["prompt", 0],
            negative=["avoid", 0],
            latent_image=["latent", 0],
            **SDXL_STEPS,
        ),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["checkpoint", 2]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="toma/sdxl"),
    }


def flux(unet: str, between: Graph, positive: str = "prompt") -> Graph:
    """From model files to picture; `between` holds the nodes `toma` and `latent`."""
    return {
        "unet": node("UNETLoader", unet_name=unet),
        **between,
        "clip": node(
            "DualCLIPLoader",
            clip_name1="clip_l.safetensors",
            clip_name2="t5xxl_fp16.safetensors",
            type="flux",
        ),
        "vae": node("VAELoader", vae_name="ae.safetensors"),
        "prompt": node("CLIPTextEncode", "Prompt", clip=["clip", 0], text=PROMPT),
        "guidance": node("FluxGuidance", conditioning=[positive, 0], guidance=3.5),
        "nothing": node("ConditioningZeroOut", conditioning=["prompt", 0]),
        "sampler": node(
            "KSampler",
            model=["toma", 0],
            positive=["guidance", 0],
            negative=["nothing", 0],
            latent_image=["latent", 0],
            **FLUX_STEPS,
        ),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="toma/flux"),
    }


def sdxl_plain() -> Graph:
    """SDXL with one node before the sampler."""
    return sdxl({"toma": node("ToMAPatchModel", model=["checkpoint", 0])})


def sdxl_hires() -> Graph:
    """SDXL with a second, larger pass that has settings of its own."""
    model = ["checkpoint", 0]
    first = node("ToMAPatchModel", "ToMA, first pass", model=model, ratio=0.5)
    large = node("ToMAPatchModel", "ToMA, second pass", model=model, ratio=0.75, reuse_interval=3)
    graph = sdxl({"toma": first, "toma_large": large})
    graph["larger"] = node(
        "LatentUpscaleBy", samples=["sampler", 0], upscale_method="bislerp", scale_by=1.5
    )
    changes = {"model": ["toma_large", 0], "latent_image": ["larger", 0]}
    inputs = {**graph["sampler"]["inputs"], **changes, "steps": 20, "denoise": 0.5}
    graph["second"] = node("KSampler", "KSampler, second pass", **inputs)
    graph["decode"]["inputs"]["samples"] = ["second", 0]
    graph["save"]["inputs"]["filename_prefix"] = "toma/sdxl-hires"
    return graph


def sdxl_control() -> Graph:
    """SDXL with a LoRA and a ControlNet, its last steps left whole."""
    lora = node(
        "LoraLoader",
        model=["checkpoint", 0],
        clip=["checkpoint", 1],
        lora_name="sd_xl_offset_example-lora_1.0.safetensors",
        strength_model=0.6,
        strength_clip=0.6,
    )
    toma = node("ToMAPatchSDXL", model=["lora", 0], ratio=0.5)
    graph = sdxl({"lora": lora, "toma": toma}, clip="lora")
    graph |= {
        "picture": node("LoadImage", image="example.png"),
        "edges": node("Canny", image=["picture", 0]),
        "control_net": node(
            "ControlNetLoader", control_net_name="control-lora-canny-rank256.safetensors"
        ),
        "control": node(
            "ControlNetApplyAdvanced",
            positive=["prompt", 0],
            negative=["avoid", 0],
            control_net=["control_net", 0],
            image=["edges", 0],
            strength=0.7,
        ),
    }
    graph["sampler"]["inputs"] |= {"positive": ["control", 0], "negative": ["control", 1]}
    graph["save"]["inputs"]["filename_prefix"] = "toma/sdxl-control"
    return graph


def flux_dev() -> Graph:
    """Flux dev with one node before the sampler."""
    toma = node("ToMAPatchModel", model=["unet", 0])
    latent = node("EmptySD3LatentImage", width=1024, height=1024)
    return flux("flux1-dev.safetensors", {"toma": toma, "latent": latent})


def flux_kontext() -> Graph:
    """Flux Kontext: a picture and what to change in it."""
    between = {
        "toma": node("ToMAPatchFlux", model=["unet", 0], skip_first_double=2),
        "picture": node("LoadImage", image="example.png"),
        "scaled": node("FluxKontextImageScale", image=["picture", 0]),
        "latent": node("VAEEncode", pixels=["scaled", 0], vae=["vae", 0]),
        "reference": node("ReferenceLatent", conditioning=["prompt", 0], latent=["latent", 0]),
    }
    graph = flux("flux1-dev-kontext_fp8_scaled.safetensors", between, positive="reference")
    graph["prompt"]["inputs"]["text"] = "make it a snowy winter evening, keep everything else"
    graph["guidance"]["inputs"]["guidance"] = 2.5
    graph["save"]["inputs"]["filename_prefix"] = "toma/kontext"
    return graph


def compare() -> Graph:
    """SDXL at several ratios: pictures, table and plot."""
    graph = sdxl({})
    inputs = {**graph["sampler"]["inputs"], "model": ["checkpoint", 0]}
    graph["sampler"] = node("ToMABenchmark", **inputs, ratios="0, 0.25, 0.5, 0.75")
    graph["save"]["inputs"]["filename_prefix"] = "toma/compare"
    graph["table"] = node("PreviewAny", "Table", source=["sampler", 1])
    graph["plot"] = node("PreviewImage", "Plot", images=["sampler", 2])
    return graph


EXAMPLES: dict[str, tuple[Graph, str]] = {
    "ToMA SDXL": (
        sdxl_plain(),
        "**SDXL with ToMA.** One node between the checkpoint and the sampler. Compare with *ratio* "
        "0, which gives exactly the picture without it; the seed is fixed. After a run the node "
        "says what merged.",
    ),
    "ToMA SDXL hires second pass": (
        sdxl_hires(),
        "**Two passes, each with its own ToMA.** The first one sets the composition and merges "
        "gently; the second one is larger, has more tokens that are alike, and gains most.",
    ),
    "ToMA SDXL LoRA and ControlNet": (
        sdxl_control(),
        "**With LoRA and ControlNet.** ToMA comes after the LoRA, and merges half of the tokens, "
        "which keeps fine detail. Choose your own LoRA, ControlNet and picture.",
    ),
    "ToMA Flux dev": (
        flux_dev(),
        "**Flux dev with ToMA.** One node between the model and the sampler. Text never merges. "
        "Compare with *ratio* 0; the seed is fixed.",
    ),
    "ToMA Flux Kontext": (
        flux_kontext(),
        "**Kontext with ToMA for Flux.** The reference picture merges as a picture of its own, so "
        "you gain twice. *skip_first_double* keeps the first two double blocks whole, which helps "
        "fine detail.",
    ),
    "ToMA compare": (
        compare(),
        "**Several ratios with one seed.** *ToMA: Compare* takes the place of a KSampler and takes "
        "the model without a ToMA node. The pictures come in the order of the table; seconds are "
        "those of sampling alone, difference is that of the latents.",
    ),
}
"""Graph and note of every example, by the name that the template browser shows."""

FILES = {
    "ckpt_name": "checkpoints",
    "unet_name": "unet",
    "clip_name1": "text_encoders",
    "clip_name2": "text_encoders",
    "vae_name": "vae",
    "lora_name": "loras",
    "control_net_name": "controlnet",
}
"""Inputs that name a model file, and the folder in which ComfyUI looks for it."""


def model_files(graph: Graph) -> list[str]:
    """The model files that a graph names, as paths below ComfyUI's `models`."""
    inputs = [(key, value) for node in graph.values() for key, value in node["inputs"].items()]
    return [f"{FILES[key]}/{value}" for key, value in inputs if key in FILES]


def place_files(base: Path, comfyui: Path) -> None:
    """Empty files for all models that the examples name, so that ComfyUI misses none."""
    for graph, _ in EXAMPLES.values():
        for name in model_files(graph):
            file = base / "models" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    (base / "input").mkdir()
    shutil.copy(comfyui / "input" / "example.png", base / "input")
