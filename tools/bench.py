"""`python tools bench`: what merging saves, measured against stock and against other methods."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Threads that wait without spinning: on shared cores spinning slows everyone, us included.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import bench_gpu
import bench_peers
import bench_presets
import bench_scale
import torch
from bench_clock import Clock, machine_name
from bench_host import load_host
from bench_measure import ROUNDS, Stock, measure
from bench_models import Shape, build, compiled, make_work
from bench_table import write

RATIOS = (0.0, 0.25, 0.5, 0.75)
SCOPES = ("block", "modules", "attention")
SIZES = (512, 1024, 1536, 2048)


def main(argv: list[str]) -> int:
    """Run one benchmark, print its table and write its rows; returns the exit code."""
    options = parse(argv)
    if options.what == "gpu":
        return bench_gpu.main(argv[1:])
    load_host()
    if getattr(options, "threads", 0):
        torch.set_num_threads(options.threads)
    rows = {
        "sdxl": _model,
        "flux": _model,
        "peers": bench_peers.rows,
        "scale": bench_scale.rows,
        "presets": bench_presets.rows,
    }
    write(rows[options.what](options), machine_name("cpu"), options.json)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The options of a benchmark."""
    parser = argparse.ArgumentParser(prog="python tools bench", description=__doc__)
    kinds = parser.add_subparsers(dest="what", required=True)
    for kind, about in (
        ("sdxl", "the real, full-size SDXL UNet with random weights"),
        ("flux", "a Flux of full width with as many blocks as you like"),
        ("peers", "the same work for other methods, with output error against stock"),
        ("presets", "FLOPs of whole runs with each preset; shapes only, so it is quick"),
        ("scale", "how cost grows from 256 to 4096 px, and with batch; global regions"),
    ):
        one = kinds.add_parser(kind, help=about)
        one.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
        one.add_argument("--tiny", action="store_true", help="tiny models, to try the tool itself")
        if kind == "presets":
            one.add_argument("--sizes", type=int, nargs="+", default=(1024, 2048), help="pixels")
            one.add_argument("--steps", type=int, nargs="+", default=(4, 8, 20), help="of a run")
            continue
        one.add_argument("--rounds", type=int, default=ROUNDS, help="calls behind each median")
        one.add_argument("--threads", type=int, default=0, help="default: as many as cores")
        one.add_argument(
            "--cpu-time",
            action="store_true",
            help="measure processor time, which other programs do not lengthen",
        )
        if kind == "scale":
            sizes, batches = bench_scale.SIZES, (1, 2)
            one.add_argument("--exact", action="store_true", help="exact greedy at 4096 tokens too")
        else:
            sizes, batches = (1024,), (1,)
            one.add_argument("--double", type=int, default=2, help="double blocks of the Flux")
            one.add_argument("--single", type=int, default=4, help="single blocks of the Flux")
        if kind in ("sdxl", "flux"):
            one.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
            one.add_argument("--scopes", nargs="+", default=["block"], choices=SCOPES)
            one.add_argument("--keep-detail", action="store_true", help="with kept detail")
            one.add_argument(
                "--reuse-interval", type=int, default=5, metavar="STEPS", help="default 5"
            )
            one.add_argument(
                "--compile",
                action="store_true",
                help="both through TorchCompileModel (inductor), with PyTorch's attention",
            )
            one.add_argument("--all", action="store_true", help="every size, batch, scope: hours")
        if kind == "peers":
            one.add_argument("--model", choices=("sdxl", "flux"), default="sdxl")
            one.add_argument("--only", nargs="+", default=[], help="names of methods")
        one.add_argument("--sizes", type=int, nargs="+", default=sizes, help="pixels")
        one.add_argument("--batches", type=int, nargs="+", default=batches)
    kinds.add_parser("gpu", help="SDXL and Flux on a CUDA machine: see gpu --help", add_help=False)
    options, rest = parser.parse_known_args(argv)
    if rest and options.what != "gpu":
        parser.error(f"unknown options: {' '.join(rest)}")
    return options


def _model(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of stock against ToMA."""
    from comfyui_toma.nodes.attach import attach
    from comfyui_toma.toma_core.config import MergeConfig

    shape = Shape(options.what, options.tiny, options.double, options.single)
    sizes, batches, scopes = options.sizes, options.batches, options.scopes
    if options.all:
        sizes, batches, scopes = SIZES, (1, 2), SCOPES
    if options.compile:
        import comfy.cli_args

        # What ComfyUI takes on a CPU asks for free memory, which breaks every graph.
        comfy.cli_args.args.use_pytorch_cross_attention = True
    model = build(shape, "cpu")
    if options.compile:
        model = compiled(model)
    for size in sizes:
        for batch in batches:
            stock = Stock(make_work(shape, model, size, batch), Clock(options.cpu_time))
            for scope in scopes:
                # Ratio 0 is the same in every scope.
                for ratio in options.ratios if scope == scopes[0] else filter(None, options.ratios):
                    config = MergeConfig(
                        ratio=ratio,
                        scope=scope,
                        reuse_interval=options.reuse_interval,
                        keep_detail=options.keep_detail,
                    )
                    row, parts, _ = measure(
                        stock,
                        lambda model, config=config: attach(model, config),
                        config,
                        scope=scope,
                        ratio=ratio,
                        rounds=options.rounds,
                        parts_too=not options.compile,
                    )
                    shares = {name: part / row.stock_seconds for name, part in parts.items()}
                    values = row.as_json()
                    if options.compile:
                        values["note"] = "compiled"
                    yield {"row": values, **shares, "peak": row.peak_mib / stock.peak - 1}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
