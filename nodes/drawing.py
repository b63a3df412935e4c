"""Pictures that nodes draw: from Pillow to ComfyUI and back."""

from __future__ import annotations

import numpy
import torch
from PIL import Image, ImageFont
from torch import Tensor

PAPER, INK, FAINT, ACCENT = "#ffffff", "#1f2430", "#d5d9e0", "#d9480f"


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, at ``size`` pixels."""
    return ImageFont.load_default(size)


def to_tensor(picture: Image.Image) -> Tensor:
    """A picture as an IMAGE ``(1, height, width, 3)``, 0 to 1."""
    return torch.from_numpy(numpy.array(picture.convert("RGB")))[None].float() / 255


def to_picture(image: Tensor) -> Image.Image:
    """One picture of a batch, ``(height, width, channels)``, 0 to 1."""
    pixels = (image[..., :3].clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.cpu().numpy())
