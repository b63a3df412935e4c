"""How the cost of merging grows with the picture, and what stochastic selection loses."""

from __future__ import annotations

import argparse
import runpy
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_clock import Clock
from bench_host import ROOT
from bench_measure import own_work, steps_of, typical_steps
from bench_models import Shape, Work
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

SIZES = (256, 512, 1024, 2048, 4096)
LARGEST_GLOBAL = 4096
"""Tokens; beyond, all pairs of tokens no longer fit in memory."""

RATIOS = (0.5, 0.75)
STEPS = 8
"""Sampling steps of the small model before its activations are taken."""


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """First the growth of one transformer block, then what global selection loses."""
    for region in ("tile", "stripe", "global"):
        for batch in options.batches:
            for size in options.sizes:
                if region != "global" or (size // 16) ** 2 <= LARGEST_GLOBAL:
                    yield block_row(region, size, batch, options)
    for path in sorted((ROOT / "tools" / "mini").glob("*.safetensors")):
        for tokens in (256, 1024, *([4096] if options.exact else [])):
            for ratio in RATIOS:
                yield loss_row(path, tokens, ratio)


def _line(row: dict[str, Any], **only_shown: Any) -> dict[str, Any]:
    """A line in which what was not measured is None."""
    names = (
        "model", "size", "batch", "scope", "ratio", "seconds", "stock_seconds", "speedup", "tflop",
        "bound", "efficiency", "own_share", "peak_mib", "region", "tokens", "loss", "random",
    )  # fmt: skip
    parts = ("selection", "weights", "merge", "unmerge")
    return {"row": {name: row.get(name) for name in names}, **dict.fromkeys(parts), **only_shown}


def block_row(region: str, size: int, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """One block of SDXL's finer level, stock and merged, with a pattern all of its own."""
    from comfy.ldm.modules.attention import BasicTransformerBlock
    from comfyui_toma.toma_core.config import MergeConfig
    from comfyui_toma.toma_core.regions import build_layout
    from comfyui_toma.toma_core.schedule import Epoch
    from comfyui_toma.toma_core.session import Session

    channels, heads = (64, 1) if options.tiny else (640, 10)
    config = MergeConfig(ratio=0.5, region=region)
    side = size // 16
    layout = build_layout(((side, side),), config)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, side * side, channels, generator=generator).bfloat16()
    text = torch.randn(batch, 77, channels, generator=generator).bfloat16()
    block = BasicTransformerBlock(channels, heads, 64, context_dim=channels, dtype=torch.bfloat16)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=channels**-0.5)
    conditions = tuple(range(batch))
    shares = sorted(typical_steps(config).items())

    def merged_step(session: Session, step: int) -> Tensor:
        plan = session.plan("block", conditions, Epoch(0, step), layout, x).plan
        small = plan.merge(x)
        return x + plan.unmerge(block(small, context=text) - small)

    def interval(clock: Clock) -> tuple[float, dict[str, float]]:
        """Seconds of a step averaged over an interval, and of the parts of our own work."""
        session, seconds, parts = Session(config), 0.0, Counter()
        for step, share in shares:
            with own_work(clock) as timer:
                seconds += share * clock.time(lambda step=step: merged_step(session, step))
            for name, part in timer.seconds().items():
                parts[name] += share * part
        return seconds, parts

    clock = Clock(options.cpu_time)
    with torch.inference_mode():
        interval(clock), block(x, context=text)  # warms up
        stock, merged, all_parts = [], [], []
        for _ in range(options.rounds):
            stock.append(clock.time(lambda: block(x, context=text)))
            seconds, parts = interval(clock)
            merged.append(seconds)
            all_parts.append(parts)
        counts = []
        for call in (lambda: block(x, context=text), lambda: merged_step(Session(config), 0)):
            with FlopCounterMode(display=False) as counter:
                call()
            counts.append(counter.get_total_flops() / 1e12)
    stock_seconds, seconds = statistics.median(stock), statistics.median(merged)
    own = {
        name: statistics.median(parts[name] for parts in all_parts) / stock_seconds
        for name in ("selection", "weights", "merge", "unmerge")
    }
    speedup, bound = stock_seconds / seconds, counts[0] / counts[1]
    return _line(
        {
            "model": "sdxl block",
            "size": size,
            "batch": batch,
            "scope": "block",
            "ratio": 0.5,
            "seconds": seconds,
            "stock_seconds": stock_seconds,
            "speedup": speedup,
            "tflop": counts[1],
            "bound": bound,
            "efficiency": speedup / bound,
            "own_share": sum(own.values()),
            "region": region,
            "tokens": side * side,
        },
        **own,
    )


def loss_row(path: Path, tokens: int, ratio: float) -> dict[str, Any]:
    """Stochastic against exact selection over all tokens, on activations of a trained model.

    Seconds are those of stochastic selection, stock seconds those of exact greedy. `loss` and
    `random` are shares of exact greedy's objective that stochastic greedy, and destinations drawn
    at random, fall short by; the mean over the model's sites.
    """
    from comfyui_toma.toma_core import selection

    losses, random, seconds, exact_seconds = [], [], 0.0, 0.0
    for x in activations(path, tokens):
        cosine = selection.similarity(selection.unit_rows(x))
        count = tokens - round(ratio * tokens)
        drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))[:count]
        started = time.perf_counter()
        few = selection.stochastic_facility_location(cosine, count)
        seconds += time.perf_counter() - started
        started = time.perf_counter()
        best = objective(cosine, selection.facility_location(cosine, count))
        exact_seconds += time.perf_counter() - started
        losses.append(1 - objective(cosine, few) / best)
        random.append(1 - objective(cosine, drawn[None]) / best)
    sites = len(losses)
    return _line(
        {
            "model": path.stem,
            "batch": 1,
            "ratio": ratio,
            "seconds": seconds / sites,
            "stock_seconds": exact_seconds / sites,
            "region": "global",
            "tokens": tokens,
            "loss": sum(losses) / sites,
            "random": sum(random) / sites,
        }
    )


def objective(cosine: Tensor, picks: Tensor) -> float:
    """How well all tokens are represented by ``(1, count)`` picks: ``sum_j max_i S_ij``."""
    return float(cosine[0, picks[0]].amax(0).sum(dtype=torch.float64))


def activations(path: Path, tokens: int) -> list[Tensor]:
    """What selection sees at each site of a small Flux model in mid-sampling.

    Returns:
        One ``(1, tokens, channels)`` per site.
    """
    import comfy.sd
    from comfyui_toma.nodes.attach import attach
    from comfyui_toma.toma_core import session
    from comfyui_toma.toma_core.config import MergeConfig

    # Acts when it is run: without it an older ComfyUI refuses a Flux of this width.
    runpy.run_path(str(ROOT / "tools" / "demo_pack" / "detection.py"))
    model = comfy.sd.load_diffusion_model(str(path))
    model.model.to(model.load_device).float()
    inner = model.model.diffusion_model
    side = round(tokens**0.5) * inner.patch_size
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "c_crossattn": torch.zeros(1, 8, inner.txt_in.in_features),
        "y": torch.zeros(1, inner.vector_in.in_layer.in_features),
    }
    x = torch.randn(1, 16, side, side, generator=generator)
    sigmas = torch.linspace(1, 0.3, STEPS + 1)
    with torch.inference_mode():
        for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
            work = Work(Shape("flux"), side * 8, 1, model, x, arguments)
            clean = work.call({}, sigma[None], sigmas)
            x = clean + following / sigma * (x - clean)
    seen: list[Tensor] = []
    choose = session.build_plan

    def record(features: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(features)
        return choose(features, *args, **kwargs)

    session.build_plan = record
    try:
        config = MergeConfig(ratio=0.5)
        work = Work(Shape("flux"), side * 8, 1, model, x, arguments)
        with steps_of(work, attach(model, config), config) as step:
            step(0)
    finally:
        session.build_plan = choose
    return seen
