"""The demo's graph: stock ComfyUI nodes, our node, and the helpers of `demo_pack`."""

from __future__ import annotations

from typing import Any

NODE = "ToMAPatchModel"
HELPERS = ("ToMADemoPrompt", "ToMADemoDecode", "ToMADemoMeter", "ToMADemoReport")
METER = "toma_demo_meter"  # what ToMADemoReport calls its result
MODEL = "mini-flux-scenes.safetensors"
PATCH = 2  # pixels a side of MODEL's tokens
# 64 px pictures, 2x2 latent positions a token, and ComfyUI's latent node divides by 8
LATENT_SIDE = 64 // PATCH * 2 * 8
CFG = 2.0
SEED = 7


def graph(
    ratio: float | None, run: int, steps: int, pictures: list[str], defaults: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The graph of one run in ComfyUI's API format.

    Args:
        ratio: for our node; None leaves it out.
        run: 0 paints and counts; others are timed, and their number keeps ComfyUI from answering
            out of its cache.
        defaults: the other inputs of our node.
    """
    nodes: dict[str, tuple[str, dict[str, Any]]] = {
        "unet": ("UNETLoader", {"unet_name": MODEL, "weight_dtype": "default"}),
        "prompt": ("ToMADemoPrompt", {"names": "\n".join(pictures)}),
        "nothing": ("ToMADemoPrompt", {"names": ""}),
        "noise": (
            "EmptySD3LatentImage",
            {"width": LATENT_SIDE, "height": LATENT_SIDE, "batch_size": len(pictures)},
        ),
        "meter": ("ToMADemoMeter", {"model": ["unet", 0], "run": run, "count": run == 0}),
        "sampler": (
            "KSampler",
            {
                "model": ["meter", 0],
                "positive": ["prompt", 0],
                "negative": ["nothing", 0],
                "latent_image": ["noise", 0],
                "seed": SEED,
                "steps": steps,
                "cfg": CFG,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        ),
        "report": ("ToMADemoReport", {"model": ["meter", 0], "latent": ["sampler", 0]}),
    }
    if ratio is not None:
        nodes["toma"] = (NODE, {**defaults, "model": ["unet", 0], "ratio": ratio})
        nodes["meter"][1]["model"] = ["toma", 0]
    if run == 0:
        nodes["decode"] = ("ToMADemoDecode", {"latent": ["sampler", 0], "patch": PATCH})
        nodes["save"] = ("SaveImage", {"images": ["decode", 0], "filename_prefix": "toma"})
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}
