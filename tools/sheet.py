"""The demo's pictures: how far two are apart, and the contact sheet of all."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
from PIL import Image, ImageDraw, ImageFont

SIDE = 128  # of one picture on the sheet, twice its own size
MARGIN = 16
TEXT_SIZE = 18
HEAD = 4 * MARGIN  # room for a name of two lines


def psnr(reference: Path, image: Path) -> float | None:
    """Peak signal-to-noise ratio in dB: `10 log10(255^2 / mean squared error)` over all pixels.

    None for equal pictures, whose ratio is infinite.
    """
    pixels = [numpy.asarray(Image.open(path).convert("RGB"), float) for path in (reference, image)]
    error = float(numpy.mean((pixels[0] - pixels[1]) ** 2))
    return 10 * math.log10(255**2 / error) if error else None


def contact_sheet(rows: list[tuple[str, Path]], names: list[str], target: Path) -> Path:
    """Write one labelled row of pictures per setting, a column per name; returns `target`.

    Args:
        rows: label and file of each row; a file holds one square picture per name, side by side.
    """
    font = ImageFont.load_default(TEXT_SIZE)
    label_width = MARGIN + math.ceil(max(font.getlength(label) for label, _ in rows))
    size = (
        label_width + len(names) * (SIDE + MARGIN) + MARGIN,
        HEAD + len(rows) * (SIDE + MARGIN),
    )
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for column, name in enumerate(names):
        middle = label_width + MARGIN + column * (SIDE + MARGIN) + SIDE // 2
        lines = name.replace(", ", "\n")  # what, and before what
        draw.multiline_text((middle, HEAD / 2), lines, "black", font, anchor="mm", align="center")
    for index, (label, file) in enumerate(rows):
        top = HEAD + index * (SIDE + MARGIN)
        draw.text((MARGIN, top + SIDE // 2), label, "black", font, anchor="lm")
        strip = Image.open(file).convert("RGB")
        for column in range(len(names)):
            corner = column * strip.height
            picture = strip.crop((corner, 0, corner + strip.height, strip.height))
            # nearest: the sheet must not hide what merging does to single pixels
            picture = picture.resize((SIDE, SIDE), Image.Resampling.NEAREST)
            sheet.paste(picture, (label_width + MARGIN + column * (SIDE + MARGIN), top))
    sheet.save(target)
    return target
