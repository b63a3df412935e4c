"""The demo on the terminal: its table and its progress."""

from __future__ import annotations

import sys
from typing import Any

from packages import say


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows in columns."""
    head = ("ratio", "mean tokens/block", "TFLOP/step", "s/step", "speed-up", "PSNR dB", "file")
    line = "{:>5}  {:>17}  {:>10}  {:>7}  {:>8}  {:>7}  {}".format
    print("\n" + line(*head))
    for row in rows:
        decibels = "-" if row["psnr_db"] is None else f"{row['psnr_db']:.1f}"
        print(
            line(
                f"{row['ratio']:.2f}",
                f"{row['tokens_before']} -> {row['tokens_after']}",
                f"{row['tflop_per_step']:.4f}",
                f"{row['seconds_per_step']:.3f}",
                f"{row['speedup']:.2f}x",
                decibels,
                row["image"],
            )
        )


class Bar:
    """One line a run: on a terminal a bar that fills, elsewhere the finished line alone."""

    WIDTH = 20

    def __init__(self, label: str) -> None:
        self.label = label
        self(0, 1)

    def __call__(self, step: int, steps: int) -> None:
        if sys.stderr.isatty():
            full = self.WIDTH * step // steps
            bar = "#" * full + "-" * (self.WIDTH - full)
            print(f"\r\033[K{self.label} {bar} {step}/{steps}", end="", file=sys.stderr, flush=True)

    def done(self, result: str) -> None:
        """Close the line with what came out."""
        say(("\r\033[K" if sys.stderr.isatty() else "") + f"{self.label} {result}")
