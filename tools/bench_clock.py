"""Clocks, nested spans and peak memory, on the CPU and on CUDA."""

from __future__ import annotations

import functools
import platform
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class Clock:
    """Wall time; with `cpu`, processor time, which other programs do not lengthen."""

    def __init__(self, cpu: bool = False) -> None:
        self._now = time.process_time if cpu else time.perf_counter

    def mark(self) -> Any:
        """A point in time."""
        return self._now()

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two points in time."""
        return end - start

    def time(self, call: Callable[[], Any]) -> float:
        """Seconds of a call."""
        start = self.mark()
        call()
        return self.between(start, self.mark())


class CudaClock(Clock):
    """Time as events on the current CUDA stream see it."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class SpanTimer:
    """Times wrapped functions; time in one wrapped function is not counted to its caller."""

    def __init__(self, clock: Clock) -> None:
        self.spans: list[tuple[str, str | None, Any, Any]] = []
        self._clock = clock
        self._open: list[str] = []

    def wrap(self, part: str, function: Callable) -> Callable:
        """`function`, its time counted to `part`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            caller = self._open[-1] if self._open else None
            self._open.append(part)
            start = self._clock.mark()
            try:
                return function(*args, **kwargs)
            finally:
                self.spans.append((part, caller, start, self._clock.mark()))
                self._open.pop()

        return timed

    def seconds(self) -> dict[str, float]:
        """Seconds of every part."""
        total: Counter[str] = Counter()
        for part, caller, start, end in self.spans:
            seconds = self._clock.between(start, end)
            total[part] += seconds
            if caller is not None:
                total[caller] -= seconds
        return dict(total)


def peak_mib(call: Callable[[], Any], work: Any) -> tuple[float, Any]:
    """Most memory in MiB that tensors hold at once during a call, weights included; its result.

    On CUDA what the allocator says. On the CPU the allocations and releases that torch's profiler
    records, summed in order: exact and repeatable, unlike the size of the process. What oneDNN
    and MKL take for themselves is not in it.
    """
    if work.x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        result = call()
        return torch.cuda.max_memory_allocated() / 2**20, result
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()  # the only place that has the order
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = sum(
        tensor.numel() * tensor.element_size()
        for tensor in work.model.model.diffusion_model.state_dict().values()
    )
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak / 2**20, result


def machine_name(device: str) -> str:
    """The machine, for a reader of figures."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        lines = (
            Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
        )
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        name = f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} cores"
    return f"{name}, bf16, torch {torch.__version__}"
