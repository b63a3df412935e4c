"""`python tools quality`: how near merged pictures are to unmerged ones, and what they cost.

The mini model paints the same prompts from the same seeds with every setting, through ComfyUI's
own sampler. Prints a table and leaves plots of quality over cost and contact sheets in a folder.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from bench_table import write
from mini_host import MODEL, MiniModel
from packages import Failed
from PIL import Image
from quality_measures import FeatureDistance, psnr, ssim
from quality_plot import plot
from sheet import contact_sheet
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from quality_rows import Row

BATCH = 8
SHOWN = 6  # pictures of each setting on a contact sheet
FIRST_SEED = 1


def main(argv: list[str]) -> int:
    """Measure, print, draw; returns the exit code."""
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    mini = MiniModel(options.model)
    from quality_rows import rows  # only now, since it imports ComfyUI

    chosen = [row for row in rows() if options.only.search(f"{row.group}: {row.name}")]
    if not chosen:
        names = "\n  ".join(f"{row.group}: {row.name}" for row in rows())
        raise Failed(f"--only must match a setting, got {options.only.pattern}: use\n  {names}")
    harness = Harness(mini, options.images, options.out)
    about = f"{options.images} pictures of {options.model.name}, torch {torch.__version__}"
    lines = (line for steps in options.steps for line in harness.lines(chosen, steps))
    write(lines, about, options.json)
    print(f"\nPlots and contact sheets: {options.out}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python tools quality", description=__doc__)

    def count(text: str) -> int:
        if (number := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
        return number

    def pattern(text: str) -> re.Pattern[str]:
        try:
            return re.compile(text, re.IGNORECASE)
        except re.error as error:
            raise argparse.ArgumentTypeError(
                f"must be a regular expression, got {text!r} ({error})"
            ) from error

    add = parser.add_argument
    add("--images", type=count, default=64, help="pictures per setting (default 64)")
    add("--steps", type=count, nargs="+", default=[8, 20, 30], help="(default 8 20 30)")
    add("--only", type=pattern, default=pattern(""), metavar="PATTERN",
        help="settings whose 'group: name' matches")  # fmt: skip
    add("--out", type=Path, default=Path("toma-quality"), metavar="FOLDER",
        help="for plots and contact sheets (default ./toma-quality)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the rows here too")
    add("--model", type=Path, default=MODEL, help="a mini model's file (default: the demo's)")
    add("--threads", type=int, default=0, help="default: as many as cores")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Painted:
    """Pictures `(images, 3, height, width)` in 0..1, and what all of them cost."""

    pixels: Tensor
    flops: int
    seconds: float


class Harness:
    """Paints the same prompts from the same seeds with every setting, and compares.

    Args:
        mini: the model.
        images: pictures per setting: every name with the first seed, then with the next.
        out: folder of all files.
    """

    def __init__(self, mini: MiniModel, images: int, out: Path) -> None:
        self._mini, self._out = mini, out
        names = mini.names
        # mixed, since the list has one subject after another
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
        self._names = [names[order[index % len(names)]] for index in range(images)]
        self._seeds = [FIRST_SEED + index // len(names) for index in range(images)]
        self._features = FeatureDistance(mini.weights, mini.fold)

    def lines(self, rows: list[Row], steps: int) -> Iterator[dict[str, Any]]:
        """A line of the table per row, then the plot and the contact sheets of all."""
        folder = self._out / f"{steps}-steps"
        folder.mkdir(parents=True, exist_ok=True)
        self._paint(lambda model: model, 1)  # warms up
        stock = self._paint(lambda model: model, steps)
        stock_strip = self._save(stock, folder / "stock.png")
        strips: dict[str, list[tuple[str, Path]]] = {}
        done = []
        for row in rows:
            painted = self._paint(row.patch, row.steps_of(steps))
            strip = self._save(painted, folder / f"{_plain(row.name)}.png")
            strips.setdefault(row.group, [("stock", stock_strip)]).append((row.name, strip))
            done.append({
                "steps": steps, "group": row.group, "setting": row.name,
                **self._compare(stock, painted),
            })  # fmt: skip
            yield {"row": done[-1]}
        plot(done, f"{steps} steps", self._out / f"quality-{steps}-steps.png")
        for group, pictures in strips.items():
            target = self._out / f"sheet-{steps}-steps-{_plain(group)}.png"
            contact_sheet(pictures, self._names[:SHOWN], target)

    def _paint(self, patch: Callable[[Any], Any], steps: int) -> Painted:
        from demo_pack.meter import UNCOUNTED

        pictures, seconds = [], 0.0
        # Every run is counted, since what some methods cost depends on the picture.
        counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
        for first in range(0, len(self._names), BATCH):
            part = slice(first, first + BATCH)
            model = patch(self._mini.model)
            start = time.perf_counter()
            with counter:
                latents = self._mini.sample(model, self._names[part], self._seeds[part], steps)
            seconds += time.perf_counter() - start
            pictures.append(self._mini.pixels(latents))
        return Painted(torch.cat(pictures), counter.get_total_flops(), seconds)

    def _compare(self, stock: Painted, painted: Painted) -> dict[str, float]:
        """Measures of pictures and cost against stock, as the table names them."""
        near = psnr(stock.pixels, painted.pixels)
        values = {
            "flops": painted.flops / stock.flops,
            "time": painted.seconds / stock.seconds,
            "psnr": float(near.mean()),
            "worst": float(near.min()),
            "ssim": float(ssim(stock.pixels, painted.pixels).mean()),
            "features": float(self._features(stock.pixels, painted.pixels).mean()),
        }
        return {name: round(value, 5) for name, value in values.items()}

    def _save(self, painted: Painted, file: Path) -> Path:
        """Write the pictures of a contact sheet's row side by side; returns `file`."""
        strip = torch.cat(tuple(painted.pixels[:SHOWN]), dim=2).movedim(0, 2)
        Image.fromarray((strip * 255).round().numpy().astype(numpy.uint8)).save(file)
        return file


def _plain(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
