"""Other ways to save the same work, each as its authors or ComfyUI set it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench_clock import Clock
from bench_measure import Stock, measure
from bench_models import Shape, build, make_work
from bench_table import Row


@dataclass(frozen=True)
class Peer:
    """A way to patch a MODEL.

    Attributes:
        config: of our node; None for another node.
        every: only every such step merges, the others run stock.
    """

    name: str
    patch: Callable[[Any], Any]
    scope: str
    ratio: float
    config: Any = None
    every: int = 1


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line per method, size and batch."""
    shape = Shape(options.model, options.tiny, options.double, options.single)
    model = build(shape, "cpu")
    for size in options.sizes:
        for batch in options.batches:
            stock = Stock(make_work(shape, model, size, batch), Clock(options.cpu_time))
            for peer in peers(shape):
                if options.only and peer.name not in options.only:
                    continue
                torch.manual_seed(0)  # some nodes draw from the global generator
                measured = measure(
                    stock,
                    peer.patch,
                    peer.config,
                    scope=peer.scope,
                    ratio=peer.ratio,
                    rounds=options.rounds,
                )
                row = thinned(measured.row, stock.tflop, peer.every)
                values = {**row.as_json(), "method": peer.name, "error": measured.error}
                yield {"row": values, "peak": row.peak_mib / stock.peak - 1}


def peers(shape: Shape) -> list[Peer]:
    """Every method that works on a model of this shape."""
    from comfyui_toma.nodes.flux import FluxBlocks
    from comfyui_toma.toma_core import config as settings

    config = settings.MergeConfig
    found = [
        _ours("ToMA", config(ratio=0.5)),
        _ours("ToMA, as in the paper", config(ratio=0.5, scope="modules")),
    ]
    if hasattr(settings, "Matching"):
        for name, interval in (("ToMe", 1), ("ToFu", 1), ("CA-ToMe", 5)):
            matching = settings.Matching(method=name)
            found.append(
                _ours(
                    name,
                    config(
                        ratio=0.5, scope="attention", reuse_interval=interval, matching=matching
                    ),
                )
            )
    if shape.kind == "sdxl":
        return [*found, Peer("ComfyUI ToMe", _comfyui_tome, "attention", 0.5),
                Peer("ComfyUI HyperTile", _comfyui_hypertile, "attention", 0.0)]  # fmt: skip
    # The published schedule leaves the first 5 of 19 and of 38 blocks whole; here the same share.
    blocks = FluxBlocks(
        skip_first_double=round(shape.double * 5 / 19),
        skip_first_single=round(shape.single * 5 / 38),
    )
    published = config(ratio=0.5, scope="modules", tile_size=4, reuse_interval=1)
    return [*found, _ours("ToMA, published schedule", published, blocks, every=3)]


def _ours(name: str, config: Any, blocks: Any = None, every: int = 1) -> Peer:
    from comfyui_toma.nodes.attach import attach

    return Peer(
        name,
        lambda model: attach(model, config, blocks),
        config.scope.value,
        config.ratio,
        config,
        every,
    )


def _comfyui_tome(model: Any) -> Any:
    from comfy_extras.nodes_tomesd import TomePatchModel

    return _first(TomePatchModel.execute(model, 0.5))


def _comfyui_hypertile(model: Any) -> Any:
    from comfy_extras.nodes_hypertile import HyperTile

    return _first(HyperTile.execute(model, 256, 2, 1, False))


def _first(output: Any) -> Any:
    """The one output of a ComfyUI node, which some versions wrap."""
    return getattr(output, "args", output)[0]


def thinned(row: Row, stock_tflop: float, every: int) -> Row:
    """The row of a method that merges every `every`-th step only."""
    seconds = (row.seconds + (every - 1) * row.stock_seconds) / every
    tflop = (row.tflop + (every - 1) * stock_tflop) / every
    speedup, bound = row.stock_seconds / seconds, stock_tflop / tflop
    return dataclasses.replace(
        row,
        seconds=seconds,
        tflop=tflop,
        speedup=speedup,
        bound=bound,
        efficiency=speedup / bound,
        own_share=row.own_share / every,
    )
