"""Measures stock against merged calls: time, FLOPs, the share of our own work, peak memory."""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from bench_clock import Clock, SpanTimer, peak_mib
from bench_host import load_host
from bench_models import Shape, Work, build, make_work
from bench_table import Row
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

ROUNDS = 3
PARTS = ("selection", "weights", "merge", "unmerge")


def typical_steps(config: Any) -> dict[int, float]:
    """One step of each kind (select, reweigh, reuse) of an interval, and the share of its kind.

    Nothing merges at ratio 0: there all steps are alike. CA-ToMe's first interval is unlike the
    others, see ``_begins_whole``.
    """
    load_host()
    from comfyui_toma.toma_core.schedule import Schedule

    if config is None or config.is_identity:
        return {0: 1.0}
    sigmas = tuple(map(float, sigmas_for(config)))
    schedule = Schedule(
        sigmas, float("inf"), float("-inf"), config.reuse_interval, config.weight_steps
    )
    epochs = [schedule.epoch(sigma) for sigma in sigmas[:-2]]
    actions = [now.action(held) for held, now in zip([None, *epochs], epochs, strict=False)]
    first = config.reuse_interval if _begins_whole(config) else 0
    actions = actions[first : first + config.reuse_interval]
    return {first + actions.index(kind): n / len(actions) for kind, n in Counter(actions).items()}


def sigmas_for(config: Any) -> Tensor:
    """Sigmas of a run of one reuse interval and a step more, since the last may stay whole."""
    steps = config.reuse_interval if config else 1
    return torch.linspace(1.0, 0.5, (2 if _begins_whole(config) else 1) * steps + 2)


def _begins_whole(config: Any) -> bool:
    """True for CA-ToMe: its first call merges nothing, what it found alike serves from the next.

    Its second interval is measured.
    """
    from comfyui_toma.toma_core.config import Method

    return config is not None and config.method is Method.CA_TOME


@contextmanager
def steps_of(work: Work, patched: Any, config: Any) -> Iterator[Callable[[int], Tensor]]:
    """A fresh sampling run of a patched MODEL: a function that makes the call of one step.

    Args:
        config: of our node; None for a MODEL without it.
    """
    load_host()
    from comfyui_toma.nodes.attach import open_run
    from comfyui_toma.nodes.options import KEY

    sigmas = sigmas_for(config)
    if KEY not in patched.model_options.get("transformer_options", {}):
        options = _with_wrappers(patched, patched.model_options)
        with torch.inference_mode():
            yield lambda step: work.call(options, sigmas[step : step + 1], sigmas)
        return
    run, options = open_run(patched, patched.model_options, sigmas, tuple(work.x.shape[-2:]))
    options = _with_wrappers(patched, options)
    try:
        with torch.inference_mode():
            # As the sampler does, else a second call counts as another part of the first.
            def call(step: int) -> Tensor:
                return run.calc_cond_batch(work.call, options, sigmas[step : step + 1], sigmas)

            if _begins_whole(config):
                call(0)
            yield call
    finally:
        run.close()


def _with_wrappers(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Model options with the MODEL's own wrappers, as ComfyUI joins them before it samples."""
    from comfy.model_patcher import create_model_options_clone
    from comfy.patcher_extension import merge_nested_dicts

    options = create_model_options_clone(options)
    wrappers = options.setdefault("transformer_options", {}).setdefault("wrappers", {})
    merge_nested_dicts(wrappers, model.wrappers, copy_dict1=False)
    return options


def tflop(work: Work, patch: Callable[[Any], Any], config: Any) -> float:
    """TFLOP of a call, averaged over an interval, counted on a model without memory.

    A method that merges as many tokens as are alike can only be counted on the tokens themselves.

    Args:
        patch: takes a MODEL and returns the patched one.
    """
    shapes = make_work(work.shape, shapes_only(work.shape), work.size, work.batch)
    try:
        return _counted(shapes, patch, config)
    except NotImplementedError:  # what torch raises where shapes depend on data
        return _counted(work, patch, config)


def _counted(work: Work, patch: Callable[[Any], Any], config: Any) -> float:
    with steps_of(work, patch(counting(work.model)), config) as step:
        shares = sorted(typical_steps(config).items())
        return sum(share * count_flops(step, number) for number, share in shares)


def counting(model: Any) -> Any:
    """A clone of a MODEL whose attention has the form that the FLOP counter knows."""
    from comfy.ldm.modules.attention import attention_pytorch

    def sdpa(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return attention_pytorch(*args, **kwargs)

    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    options["optimized_attention_override"] = sdpa
    return clone


def count_flops(step: Callable[[int], Tensor], number: int) -> float:
    """TFLOP of the call of a step."""
    with FlopCounterMode(display=False) as counter:
        step(number)
    return counter.get_total_flops() / 1e12


@functools.lru_cache(maxsize=2)
def shapes_only(shape: Shape) -> Any:
    """The model without memory."""
    return build(shape, "meta")


class Stock:
    """What is known of the unpatched model, measured once per work."""

    def __init__(self, work: Work, clock: Clock) -> None:
        self.work, self.clock = work, clock
        with steps_of(work, work.model, None) as step:  # warms up, too
            self.peak, self.output = peak_mib(lambda: step(0), work)
        self.tflop = tflop(work, lambda model: model, None)

    def seconds(self) -> float:
        """Time of one call."""
        with steps_of(self.work, self.work.model, None) as step:
            return self.clock.time(lambda: step(0))


class Measured(NamedTuple):
    """A row and what a table may show beside it.

    Attributes:
        parts: seconds of each part of our own work.
        error: distance of the merged prediction from stock, over the size of the stock one.
    """

    row: Row
    parts: dict[str, float]
    error: float


def measure(
    stock: Stock,
    patch: Callable[[Any], Any],
    config: Any,
    *,
    scope: str = "",
    ratio: float = 0.0,
    rounds: int = ROUNDS,
    parts_too: bool = True,
) -> Measured:
    """One row and what goes with it.

    Stock and merged calls alternate, so that what else the machine does falls on both.

    Args:
        patch: takes a MODEL and returns the patched one.
        config: of our node; None for another node.
        scope, ratio: to name the row.
        parts_too: measure our own work. Its clock would break the graph of a compiled model.
    """
    work, clock = stock.work, stock.clock
    patched = patch(work.model)
    shares = sorted(typical_steps(config).items())
    with steps_of(work, patched, config) as step:  # warms up, too
        peak, output = peak_mib(lambda: step(0), work)
    stock_times, times = [], []
    for _ in range(rounds):
        stock_times.append(stock.seconds())
        with steps_of(work, patched, config) as step:
            times.append(
                sum(share * clock.time(lambda n=number: step(n)) for number, share in shares)
            )
    parts = _parts(work, patched, config, clock) if parts_too else {}
    seconds, stock_seconds = statistics.median(times), statistics.median(stock_times)
    counted = tflop(work, patch, config)
    speedup, bound = stock_seconds / seconds, stock.tflop / counted
    row = Row(
        work.shape.name,
        work.size,
        work.batch,
        scope,
        ratio,
        seconds,
        stock_seconds,
        speedup,
        counted,
        bound,
        speedup / bound,
        sum(parts.values()) / stock_seconds if parts_too else None,
        peak,
    )
    return Measured(row, parts, distance(output, stock.output))


def _parts(work: Work, patched: Any, config: Any, clock: Clock) -> dict[str, float]:
    """Seconds of each part of our own work, averaged over an interval."""
    parts = dict.fromkeys(PARTS, 0.0)
    with steps_of(work, patched, config) as step, own_work(clock) as timer:
        for number, share in typical_steps(config).items():
            timer.spans.clear()
            step(number)
            for name, seconds in timer.seconds().items():
                parts[name] += share * seconds
    return parts


def distance(x: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((x.float() - reference.float()).norm() / reference.float().norm())


@contextmanager
def own_work(clock: Clock) -> Iterator[SpanTimer]:
    """Times selection, weights, merge and unmerge while the context is open, from outside."""
    load_host()
    from comfyui_toma.toma_core import detail, merge, planning, session

    timer = SpanTimer(clock)
    places = (
        (session, "build_plan", "selection"),
        (planning, "assign", "weights"),
        (planning, "carry", "weights"),
        (session, "reweigh", "weights"),
        (merge.MergePlan, "merge", "merge"),
        (merge.MergePlan, "unmerge", "unmerge"),
        (detail.Carry, "take", "merge"),
        (detail.Carry, "keys", "merge"),
        (detail.Carry, "give", "unmerge"),
    )
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for (owner, name, function), (_, _, part) in zip(before, places, strict=True):
            setattr(owner, name, timer.wrap(part, function))
        yield timer
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
