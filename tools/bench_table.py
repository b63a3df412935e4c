"""Rows of a benchmark, as a table for people and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = {
    "steps": "{}", "group": "{}", "setting": "{}", "flops": "{:.2f}", "time": "{:.2f}",
    "psnr": "{:.1f}", "worst": "{:.1f}", "ssim": "{:.3f}", "features": "{:.4f}",
    "model": "{}", "method": "{}", "region": "{}", "scope": "{}", "size": "{}", "tokens": "{}",
    "batch": "{}", "ratio": "{:.2f}", "stock_seconds": "{:.3f}", "seconds": "{:.3f}",
    "speedup": "{:.2f}", "bound": "{:.2f}", "efficiency": "{:.2f}", "stock_tflop": "{:.1f}",
    "tflop": "{:.2f}",
    "own_share": "{:.2%}", "selection": "{:.2%}", "weights": "{:.2%}", "merge": "{:.2%}",
    "unmerge": "{:.2%}", "peak_mib": "{:.0f}", "peak": "{:+.1%}", "error": "{:.3f}",
    "loss": "{:.2%}", "random": "{:.2%}", "graph_speedup": "{:.2f}", "stock_kernels": "{}",
    "kernels": "{}", "selecting_kernels": "{}", "own_kernels": "{:.1f}",
    "note": "{}",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of a benchmark.

    Attributes:
        seconds, stock_seconds: of one call; merged steps are averaged over one reuse interval.
        speedup: stock over merged seconds.
        tflop: of one merged call, our own work included, averaged likewise.
        bound: stock over merged FLOPs.
        efficiency: speedup over bound.
        own_share: seconds of selection, weights, merge and unmerge over the stock call; None where
            it was not measured.
        peak_mib: most memory held at once during a merged call, weights included.
    """

    model: str
    size: int
    batch: int
    scope: str
    ratio: float
    seconds: float
    stock_seconds: float
    speedup: float
    tflop: float
    bound: float
    efficiency: float
    own_share: float | None
    peak_mib: float

    def as_json(self) -> dict[str, Any]:
        """Plain values, floats cut to what was measured."""
        values = dataclasses.asdict(self)
        return {
            key: float(f"{value:.5g}") if isinstance(value, float) else value
            for key, value in values.items()
        }


def write(lines: Iterable[dict[str, Any]], machine: str, path: Path | None) -> None:
    """Print lines as they come, as a table; write what each holds under "row" as JSON.

    Args:
        lines: values by column; those of the JSON under "row", what only the table shows beside.
    """
    print(f"Machine: {machine}\n")
    rows: list[dict[str, Any]] = []
    columns: list[str] = []
    for line in lines:
        rows.append(line["row"])
        values = {**line["row"], **line}
        if not columns:
            columns = [name for name in COLUMNS if name in values]
            print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
        cells = [COLUMNS[name].format(values[name]) if values.get(name) is not None else "-"
                 for name in columns]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
        if path is not None:  # after every line, so that what was measured outlives a stop
            path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
