"""`python tools artwork`: draw the pack's icon and banner into `assets`.

Both show what ToMA does: a picture in tiles, where tiles that are alike have merged.
"""

from __future__ import annotations

import argparse
import math

from environment import PACK

FOLDER = PACK / "assets"
ICON = 400  # pixels; the registry takes no larger one
BANNER = (1680, 720)  # 21:9
SHARPER = 3  # drawn this many times larger, then reduced
INK = (18, 20, 32)
HORIZON = 2 / 3
WORDS = (("ToMA", 120, 0.69), ("Token merging for SDXL and Flux", 44, 0.875))
"""Text, its size in pixels and its height on the banner, from 0 to 1."""

Colour = tuple[int, int, int]


def main(argv: list[str]) -> int:
    """Draw both; returns the exit code."""
    parse(argv)
    from PIL import Image, ImageDraw, ImageFont  # here: these need the environment

    FOLDER.mkdir(exist_ok=True)
    side = ICON * SHARPER
    icon = Image.new("RGB", (side, side), INK)
    tiles(ImageDraw.Draw(icon), (side, side), cells=(24, 24), largest=8)
    icon.resize((ICON, ICON), Image.Resampling.LANCZOS).save(FOLDER / "icon.png", optimize=True)

    size = (BANNER[0] * SHARPER, BANNER[1] * SHARPER)
    banner = Image.new("RGB", size, INK)
    draw = ImageDraw.Draw(banner)
    tiles(draw, size, cells=(56, 24), largest=8)
    for text, points, height in WORDS:
        font = ImageFont.load_default(points * SHARPER)
        draw.text((size[0] * 0.03, size[1] * height), text, "white", font)
    banner.resize(BANNER, Image.Resampling.LANCZOS).save(FOLDER / "banner.png", optimize=True)
    print(f"icon.png and banner.png in {FOLDER}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The command has no options."""
    parser = argparse.ArgumentParser(prog="python tools artwork", description=__doc__)
    return parser.parse_args(argv)


def tiles(draw, size: tuple[int, int], cells: tuple[int, int], largest: int) -> None:
    """Cover `size` with rounded tiles of 1 to `largest` cells, larger where the scene is even."""
    columns, rows = cells
    cell = size[0] / columns
    gap = cell * 0.12

    def tile(column: int, row: int, width: int) -> None:
        inside = [
            scene((x + 0.5) / rows, (y + 0.5) / rows, columns / rows)
            for x in range(column, column + width)
            for y in range(row, row + width)
        ]
        if width > 1 and spread(inside) > 26:
            half = width // 2
            for x, y in ((0, 0), (half, 0), (0, half), (half, half)):
                tile(column + x, row + y, half)
            return
        colour = tuple(round(sum(channel) / len(inside)) for channel in zip(*inside, strict=True))
        box = (column * cell + gap, row * cell + gap)
        end = ((column + width) * cell - gap, (row + width) * cell - gap)
        draw.rounded_rectangle((*box, *end), cell * 0.3 * math.sqrt(width), colour)

    for column in range(0, columns, largest):
        for row in range(0, rows, largest):
            tile(column, row, largest)


def scene(x: float, y: float, width: float) -> Colour:
    """An evening over the sea, at a place from (0, 0), top left, to (`width`, 1)."""
    from_sun = x - 0.7 * width
    if y > HORIZON:
        glitters = abs(from_sun) < 0.3 - 0.3 * (y - HORIZON) and math.sin(75 * y) > 0.1
        return blend((24, 58, 110), (255, 186, 106), 0.7 if glitters else 0.05)
    if math.hypot(from_sun, y - 0.6) < 0.32:
        return (255, 214, 120)
    return blend((66, 46, 122), (255, 122, 92), y / HORIZON)


def blend(one: Colour, other: Colour, share: float) -> Colour:
    """A colour between two."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def spread(colours: list[Colour]) -> float:
    """How far apart colours are: the widest range of a channel."""
    return max(max(channel) - min(channel) for channel in zip(*colours, strict=True))
