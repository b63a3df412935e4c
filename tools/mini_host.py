"""The mini model in ComfyUI's own classes, sampled by ComfyUI's own code, in this process."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from mini_checkpoint import load_weights
from mini_flux import LATENT_PATCH
from mini_pictures import text_tokens
from mini_sheet import GUIDANCE, LATENT_CHANNELS, decode
from packages import Failed
from safetensors import safe_open
from torch import Tensor

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER / "mini" / "mini-flux-scenes.safetensors"
PACK = "comfyui_toma"


def load_host() -> None:
    """Import ComfyUI (from COMFYUI_PATH) and this pack as ``comfyui_toma``, on the CPU."""
    if PACK in sys.modules:
        return
    # First, since ComfyUI has modules with names of this folder's, such as `server`.
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    import comfy.cli_args

    comfy.cli_args.args.cpu = True  # another device rounds differently
    spec = importlib.util.spec_from_file_location(
        PACK, FOLDER.parent / "__init__.py", submodule_search_locations=[str(FOLDER.parent)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"this pack is not in {FOLDER.parent}")
    pack = importlib.util.module_from_spec(spec)
    sys.modules[PACK] = pack
    spec.loader.exec_module(pack)


class MiniModel:
    """A mini model, the names of what it paints, and how it is sampled.

    Args:
        file: a `.safetensors` of `python tools train-mini`, or the demo's.

    Attributes:
        model: ComfyUI's MODEL.
        weights: of the model, in float32, under the keys of `MiniFlux`.
        names: of the pictures that it was trained on.
        fold: pixels per latent pixel and side.
        side: latent pixels per side.

    Raises:
        Failed: the file is missing or of another kind of model.
    """

    def __init__(self, file: Path = MODEL) -> None:
        self.weights = load_weights(file)
        load_host()
        import comfy.sd
        from demo_pack import detection  # noqa: F401 (lets older ComfyUI load the mini model)

        self.model = comfy.sd.load_diffusion_model(str(file))
        with safe_open(file, "pt") as opened:
            about = opened.metadata() or {}
        if "pictures" not in about:
            raise Failed(f"{file} does not say which pictures it knows: use one of train-mini")
        self.names = json.loads(about["pictures"])
        self.fold = int(about.get("patch", 4)) // LATENT_PATCH
        self.side = int(about.get("size", 64)) // self.fold

    def sample(
        self,
        model: Any,
        names: Sequence[str],
        seeds: Sequence[int],
        steps: int,
        callback: Callable | None = None,
    ) -> Tensor:
        """Latents `(names, 16, side, side)` as ComfyUI's sampler returns them.

        A picture depends on its name and seed, not on what else is in the batch.

        Args:
            model: this MODEL, patched or not.
            callback: called after every step, as ComfyUI does.
        """
        import comfy.sample

        noise = torch.stack([self._noise(seed) for seed in seeds])
        return comfy.sample.sample(
            model, noise, steps, GUIDANCE, "euler", "simple", prompt(names), prompt([""]),
            torch.zeros_like(noise), disable_pbar=True, seed=seeds[0], callback=callback,
        )  # fmt: skip

    def _noise(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(LATENT_CHANNELS, self.side, self.side, generator=generator)

    def pixels(self, latents: Tensor) -> Tensor:
        """Pictures `(batch, 3, height, width)` in 0..1 of latents that `sample` returned."""
        import comfy.latent_formats

        own = comfy.latent_formats.Flux().process_in(latents.float())
        return ((decode(own, self.fold) + 1) / 2).clamp(0, 1)


def prompt(names: Sequence[str]) -> list:
    """A CONDITIONING with one row per name."""
    context, pooled = (torch.stack(part) for part in zip(*map(text_tokens, names), strict=True))
    return [[context, {"pooled_output": pooled}]]
