"""Latents, sampling and the sample sheet of the mini model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from mini_flux import MiniFlux
from mini_pictures import text_tokens
from PIL import Image, ImageDraw
from torch import Tensor

LATENT_CHANNELS = 16
SAMPLING_STEPS = 20
GUIDANCE = 2.0
CELL = 128
LABEL_HEIGHT = 16
COLUMNS = 4


def picture_channels(fold: int) -> int:
    """Latent channels that carry the picture when `fold` x `fold` pixels are one position."""
    return 3 * fold * fold


def encode(pixels: Tensor, fold: int) -> Tensor:
    """Pixels `(batch, 3, size, size)` as latents `(batch, 16, size / fold, size / fold)`."""
    folded = F.pixel_unshuffle(pixels, fold)
    return F.pad(folded, (0, 0, 0, 0, 0, LATENT_CHANNELS - folded.shape[1]))


def decode(latent: Tensor, fold: int) -> Tensor:
    """The inverse of `encode`; what lies in the padding channels is ignored."""
    return F.pixel_shuffle(latent[:, : picture_channels(fold)], fold)


@torch.no_grad()
def sample(
    model: MiniFlux, context: Tensor, pooled: Tensor, noise: Tensor, steps: int, guidance: float
) -> Tensor:
    """Latents `(batch, 16, height, width)` by Euler steps from `noise`.

    The times fall evenly from 1 to 0: ComfyUI's euler with the simple scheduler at shift 1.
    `guidance` is the cfg of its KSampler with the empty prompt as negative.
    """
    latent = noise
    both_context = torch.cat((context, torch.zeros_like(context)))
    both_pooled = torch.cat((pooled, torch.zeros_like(pooled)))
    times = torch.linspace(1, 0, steps + 1).tolist()
    for now, later in zip(times[:-1], times[1:], strict=True):
        time = torch.full((2 * len(latent),), now, device=latent.device)
        velocity = model(torch.cat((latent, latent)), time, both_context, both_pooled)
        positive, negative = velocity.chunk(2)
        latent = latent + (later - now) * (negative + guidance * (positive - negative))
    return latent


def sample_names(
    model: MiniFlux, names: Sequence[str], size: int, fold: int, seed: int = 1
) -> Tensor:
    """Pixels `(names, 3, size, size)` that the model paints for `names`, values -1..1."""
    device = model.img_in.weight.device
    context, pooled = (torch.stack(part) for part in zip(*map(text_tokens, names), strict=True))
    side = size // fold
    # drawn on the CPU: a GPU draws other numbers from the same seed
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(names), LATENT_CHANNELS, side, side, generator=generator)
    context, pooled, noise = context.to(device), pooled.to(device), noise.to(device)
    return decode(sample(model, context, pooled, noise, SAMPLING_STEPS, GUIDANCE), fold).cpu()


def save_sheet(file: Path, names: Sequence[str], truth: Tensor, painted: Tensor) -> None:
    """Write a PNG: for each name the training picture (left) beside the painted one."""
    rows = -(-len(names) // COLUMNS)
    cell_width, cell_height = 2 * CELL, CELL + LABEL_HEIGHT
    sheet = Image.new("RGB", (COLUMNS * cell_width, rows * cell_height), "white")
    pen = ImageDraw.Draw(sheet)
    for index, name in enumerate(names):
        row, column = divmod(index, COLUMNS)
        corner = (column * cell_width, row * cell_height)
        for place, pixels in enumerate((truth[index], painted[index])):
            picture = _to_image(pixels).resize((CELL, CELL), Image.Resampling.NEAREST)
            sheet.paste(picture, (corner[0] + place * CELL, corner[1]))
        pen.text((corner[0] + 4, corner[1] + CELL + 2), name[:40], fill="black")
    sheet.save(file)


def _to_image(pixels: Tensor) -> Image.Image:
    bytes_ = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(bytes_.permute(1, 2, 0).contiguous().numpy())
