"""Quality over cost as a picture, with the front of what nothing else beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from quality_measures import EQUAL_DB

WIDTH, HEIGHT, MARGIN = 1600, 1100, 90
TEXT_SIZE, DOT = 15, 6
COLOURS = ("#1f5fbf", "#c02020", "#1c8a3c", "#8a3fbf", "#d07a00", "#444444", "#c0209a")
Box = tuple[float, float, float, float]


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points `(cost, quality)` that no cheaper or equally cheap one equals, by cost."""
    best: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or quality > best[-1][1]:
            best.append((cost, quality))
    return best


def plot(rows: list[dict[str, Any]], title: str, target: Path) -> None:
    """Write PSNR over the share of stock's FLOPs as a PNG; rows equal to stock are left out."""
    rows = [row for row in rows if row["psnr"] < EQUAL_DB]
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(TEXT_SIZE)
    draw.text((MARGIN, 20), f"{title}: PSNR in dB over FLOPs, stock = 1", "black", font)
    top = max((row["psnr"] for row in rows), default=1) * 1.05

    def place(cost: float, quality: float) -> tuple[float, float]:
        return (
            MARGIN + cost / 1.1 * (WIDTH - 2 * MARGIN),
            HEIGHT - MARGIN - quality / top * (HEIGHT - 2 * MARGIN),
        )

    for tenth in range(12):
        x, y = place(tenth / 10, 0)
        draw.line((x, y, x, MARGIN), "#e4e4e4")
        draw.text((x, y + 16), f"{tenth / 10:.1f}", "black", font, anchor="mm")
    for quality in range(0, int(top) + 1, 5):
        x, y = place(0, quality)
        draw.line((x, y, WIDTH - MARGIN, y), "#e4e4e4")
        draw.text((x - 10, y), str(quality), "black", font, anchor="rm")
    best = [place(*point) for point in front([(row["flops"], row["psnr"]) for row in rows])]
    if len(best) > 1:
        draw.line(best, "#999999", 2)
    groups = list(dict.fromkeys(row["group"] for row in rows))
    colours = {group: COLOURS[index % len(COLOURS)] for index, group in enumerate(groups)}
    for index, group in enumerate(groups):
        draw.text((MARGIN + index * 200, 50), group, colours[group], font)
    taken: list[Box] = []
    for row in rows:
        x, y = place(row["flops"], row["psnr"])
        draw.ellipse((x - DOT, y - DOT, x + DOT, y + DOT), colours[row["group"]])
        taken.append((x - DOT, y - DOT, x + DOT, y + DOT))
    for row in rows:
        spot = place(row["flops"], row["psnr"])
        box = _free(spot, draw.textlength(row["setting"], font), taken)
        taken.append(box)
        draw.text(box[:2], row["setting"], colours[row["group"]], font)
    image.save(target)


def _free(spot: tuple[float, float], width: float, taken: list[Box]) -> Box:
    """The nearest place beside a dot for a line of text, over nothing that is there already."""
    x, y = spot
    for away in range(0, 400, 6):
        for down in (-away, away):
            for left in (x + DOT + 4, x - DOT - 4 - width):
                box = (left, y + down - TEXT_SIZE / 2, left + width, y + down + TEXT_SIZE / 2)
                if not any(_overlap(box, other) for other in taken):
                    return box
    return (x, y, x + width, y + TEXT_SIZE)


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
