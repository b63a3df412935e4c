"""What the presets save over a whole sampling run, in FLOPs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from bench_measure import count_flops, counting, shapes_only, steps_of
from bench_models import Shape, Work, make_work


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each model, size, number of steps and preset; nothing is computed but shapes."""
    from comfyui_toma.nodes.presets import PRESETS
    from comfyui_toma.toma_core.config import MergeConfig

    for kind, family in (("sdxl", "SDXL"), ("flux", "Flux")):
        shape = Shape(kind, options.tiny)
        for size in options.sizes:
            work = make_work(shape, counting(shapes_only(shape)), size, 1)
            with steps_of(work, work.model, None) as step:
                stock = count_flops(step, 0)
            for name, values in PRESETS[family].items():
                config = MergeConfig(**values)
                calls = _calls(work, config)
                for steps in options.steps:
                    total = sum(
                        stock if call is None else calls[call] for call in _run(config, steps)
                    )
                    yield {
                        "row": {
                            "model": shape.name,
                            "size": size,
                            "steps": steps,
                            "setting": name,
                            "stock_tflop": steps * stock,
                            "tflop": total,
                            "bound": steps * stock / total,
                        }
                    }


def _calls(work: Work, config: Any) -> tuple[float, float]:
    """TFLOP of a step that runs whole to keep detail, and of a merged one after it."""
    from comfyui_toma.nodes.attach import attach

    with steps_of(work, attach(work.model, config), config) as step:
        return count_flops(step, 0), count_flops(step, 1)


def _run(config: Any, steps: int) -> Iterator[int | None]:
    """What each step of a run is: 0 whole, 1 merged, None left alone."""
    from comfyui_toma.toma_core.schedule import Schedule

    sigmas = tuple(torch.linspace(1, 0, steps + 1).tolist())
    interval = config.reuse_interval
    schedule = Schedule(sigmas, 2.0, -1.0, interval, interval, spares_last=config.keep_detail)
    held = None
    for sigma in sigmas[:-1]:
        epoch = schedule.epoch(sigma)
        yield epoch and int(epoch == held)
        held = epoch
