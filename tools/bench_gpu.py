"""SDXL and Flux on a CUDA machine: `python tools/bench_gpu.py [--json FILE]`.

Needs torch with CUDA, numpy, einops and safetensors, and in COMFYUI_PATH a ComfyUI of 0.3.75 to
0.18.2; later ones need comfy-kitchen and packaging too. Under 6 minutes in all. `--dry-run` does
the same with tiny models on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_clock import Clock, CudaClock, machine_name
from bench_host import load_host
from bench_measure import Stock, measure, sigmas_for, steps_of
from bench_models import Shape, build, make_work
from bench_table import write
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

MINUTES = 5.5
"""No further row is begun after this long."""


def main(argv: list[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tools bench gpu", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--models", nargs="+", default=["sdxl", "flux"])
    parser.add_argument("--sizes", type=int, nargs="+", default=(1024, 2048))
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--ratios", type=float, nargs="+", default=(0.5,))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no CUDA here; --dry-run tries the script on the CPU.", file=sys.stderr)
        return 1
    load_host()
    write(_rows(options), machine_name("cpu" if options.dry_run else "cuda"), options.json)
    return 0


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from comfyui_toma.nodes.attach import attach
    from comfyui_toma.toma_core.config import MergeConfig

    device, clock = ("cpu", Clock()) if options.dry_run else ("cuda", CudaClock())
    started = time.perf_counter()
    for kind in options.models:
        shape = _largest(kind, options.dry_run)
        model = build(shape, device)
        for size, batch in ((s, b) for s in options.sizes for b in options.batches):
            if time.perf_counter() - started > MINUTES * 60:
                print(f"\nTime is up before {shape.name} {size} px, batch {batch}.", flush=True)
                return
            stock = Stock(make_work(shape, model, size, batch), clock)
            for ratio in options.ratios:
                config = MergeConfig(ratio=ratio)
                row, parts, _ = measure(
                    stock,
                    lambda model, config=config: attach(model, config),
                    config,
                    scope="block",
                    ratio=ratio,
                    rounds=options.rounds,
                )
                shares = {name: part / row.stock_seconds for name, part in parts.items()}
                extra = _launches(stock, config)
                yield {
                    "row": {**row.as_json(), **extra},
                    **shares,
                    "peak": row.peak_mib / stock.peak - 1,
                }
        del model, stock
        if device == "cuda":
            torch.cuda.empty_cache()


def _largest(kind: str, tiny: bool) -> Shape:
    """The whole model, or as much of Flux as fits: 24 GB and its activations."""
    if tiny:
        return Shape(kind, True, 2, 3)
    if kind == "flux":
        free = torch.cuda.mem_get_info()[0] / 2**30
        share = min(1.0, max(0.0, free - 8) / 24)
        return Shape(kind, False, max(1, int(19 * share)), max(2, int(38 * share)))
    return Shape(kind)


def _launches(stock: Stock, config: Any) -> dict[str, Any]:
    """Kernels of a stock, a reused and a selecting call, and the first two in CUDA graphs.

    A graph has no gaps between kernels, so it shows what is left where launches bound eager calls.
    """
    from comfyui_toma.nodes.attach import attach

    work = stock.work
    last = len(sigmas_for(config)) - 3
    reusing = dataclasses.replace(config, weight_interval=config.reuse_interval)
    blocks = sum(
        len(getattr(module, name, ()))
        for module in work.model.model.diffusion_model.modules()
        for name in ("transformer_blocks", "double_blocks", "single_blocks")
    )
    with steps_of(work, work.model, None) as step:
        stock_kernels = kernels(lambda: step(0))
        stock_graph = graph_seconds(stock.clock, lambda: step(0))
    with steps_of(work, attach(work.model, reusing), reusing) as step:
        selecting_kernels = kernels(lambda: step(0))
        merged_kernels = kernels(lambda: step(last))
        merged_graph = graph_seconds(stock.clock, lambda: step(last))
    captured = isinstance(stock_graph, float) and isinstance(merged_graph, float)
    return {
        "stock_kernels": stock_kernels,
        "kernels": merged_kernels,
        "selecting_kernels": selecting_kernels,
        "blocks": blocks,
        "own_kernels": (merged_kernels - stock_kernels) / blocks,
        "stock_graph_seconds": stock_graph if captured else None,
        "graph_seconds": merged_graph if captured else None,
        "graph_speedup": stock_graph / merged_graph if captured else None,
        "note": "" if captured else f"no CUDA graph: {stock_graph}; {merged_graph}",
    }


class _Operators(TorchDispatchMode):
    """Counts operators that are more than a view, each of which is a kernel or more on CUDA."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def kernels(call: Callable[[], Any]) -> int:
    """Kernels and copies that a call launches; without CUDA the operators that would."""
    if not torch.cuda.is_available():
        with _Operators() as operators:
            call()
        return operators.count
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events())


def graph_seconds(clock: Clock, call: Callable[[], Any], rounds: int = 5) -> float | str:
    """Median seconds of a call as one CUDA graph, or why it cannot be captured."""
    if not isinstance(clock, CudaClock):
        return "no CUDA"
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return str(error).splitlines()[0]
    graph.replay()
    return sorted(clock.time(graph.replay) for _ in range(rounds))[rounds // 2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
