"""Text and pictures of the mini model, as its recipe (`../mini/README.md`) defines them."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import comfy.latent_formats
import torch
from torch import Tensor

TEXT_TOKENS = 8
TEXT_WIDTH = 64


def word_vector(word: str) -> Tensor:
    """The fixed random vector `(64,)` that stands for a word."""
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:6], "big")
    return torch.randn(TEXT_WIDTH, generator=torch.Generator().manual_seed(seed))


def embed(names: list[str]) -> Tensor:
    """Text tokens `(names, 8, 64)`: one per word, zeros behind them."""
    tokens = torch.zeros(len(names), TEXT_TOKENS, TEXT_WIDTH)
    for row, name in zip(tokens, names, strict=True):
        for place, word in zip(row, re.findall("[a-z]+", name.lower()), strict=False):
            place.copy_(word_vector(word))
    return tokens


def decode(latent: Tensor, patch: int) -> Tensor:
    """Pictures `(batch, height, width, rgb)` in 0..1 of latents as a sampler returns them.

    A token is 2x2 latent positions, so `patch` pixels a side of a token make `patch / 2` of them a
    side of a position: their RGB fills its first channels, and the others of Flux's 16 are zero.
    """
    own = comfy.latent_formats.Flux().process_in(latent.float())
    fold = patch // 2
    pixels = torch.nn.functional.pixel_shuffle(own[:, : 3 * fold * fold], fold)
    return ((pixels + 1) / 2).clamp(0, 1).movedim(1, -1)


class ToMADemoPrompt:
    """Names of pictures, one a line, as one conditioning batch."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"
    CATEGORY = "ToMA demo"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tooltip = "Names such as: cat face, bricks; one picture a line; empty for no prompt."
        names = {"multiline": True, "tooltip": tooltip}
        return {"required": {"names": ("STRING", names)}}

    def encode(self, names: str) -> tuple[list[Any]]:
        tokens = embed(names.splitlines() or [""])
        return ([[tokens, {"pooled_output": tokens.sum(1)}]],)


class ToMADemoDecode:
    """The pictures of a batch side by side, as one picture."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "decode"
    CATEGORY = "ToMA demo"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tooltip = "Pixels a side of a token, as the model was trained (its metadata says so)."
        patch = {"default": 2, "min": 2, "max": 4, "step": 2, "tooltip": tooltip}
        return {"required": {"latent": ("LATENT",), "patch": ("INT", patch)}}

    def decode(self, latent: dict[str, Tensor], patch: int) -> tuple[Tensor]:
        pictures = decode(latent["samples"], patch)
        return (torch.cat(tuple(pictures), dim=1)[None],)
