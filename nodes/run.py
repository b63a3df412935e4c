"""One sampling run: follows the calls of the model and gives every site its plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from ..toma_core.config import MergeConfig
from ..toma_core.detail import Carry
from ..toma_core.plan import MergePlan, Place
from ..toma_core.regions import Grid
from ..toma_core.schedule import Epoch, Schedule
from ..toma_core.session import Held, Session
from .options import Call, CallReader
from .overrides import Override, overriding
from .record import Recording
from .report import Report, Step
from .uncompiled import UNCOMPILED
from .work import Tokens, Work

RESHAPED = "another node changed the number of tokens or samples"


class Host(Protocol):
    """Merges the blocks of one diffusion model."""

    sites: list[Site]

    def overrides(self, call: Call) -> list[Override]:
        """Modules and what they run instead of ``forward`` during ``call``."""
        ...

    def work(self, call: Call, known: Mapping[nn.Module, Tokens]) -> Work | None:
        """Work of ``call``, in which blocks worked on ``known`` tokens; None if it can't tell."""
        ...


HostFactory = Callable[[nn.Module, "Run"], Host]


class Site:
    """Blocks that share a pattern; the first block of a call that needs a new one makes it.

    Args:
        run: that the patterns belong to.
        place: of these blocks in the model.

    Attributes:
        blocks: the blocks; each adds itself.
    """

    def __init__(self, run: Run, place: Place) -> None:
        self.blocks: list[nn.Module] = []
        self._run = run
        self._place = place
        self._conditions: tuple[Hashable, ...] = ()
        self._epoch: Epoch | None = None
        self._held: Held | None = None

    def begin(self, conditions: tuple[Hashable, ...], epoch: Epoch) -> None:
        """Take up the plan that still stands for a call, if there is one."""
        self._conditions, self._epoch = conditions, epoch
        self._held = self._run.session.held(self._place, conditions, epoch)

    def plan(self, x: Tensor, grids: tuple[Grid, ...], block: str) -> MergePlan | None:
        """The plan for tokens ``x`` ``(batch, tokens, channels)`` of ``grids``.

        None where ``block`` must stay whole: too few tokens, none alike enough, or a sequence that
        is not these grids; the report says which.
        """
        held = self._held
        if held is None or held.plan.grids != grids or not held.plan.fits(x):
            held = self._held = self._make(x, grids, block)
        if held is None:
            return None
        if held.plan.is_identity:
            if held.waits:
                self._run.report.looks()
            else:
                self._run.report.aside("no two tokens were alike enough", block)
            return None
        note = self._run.report.whole if held.runs_whole else self._run.report.merged
        note(block, held.plan.tokens, held.plan.merged)
        return held.plan

    @property
    def tokens(self) -> Tokens | None:
        """What each of these blocks worked on in the last call; None where none has a plan."""
        held = self._held
        if held is None:
            return None
        if held.plan.is_identity or held.runs_whole:
            return Tokens.whole(held.plan.tokens)
        return Tokens.merged(held.plan, self._run.config)

    def carry(self, name: str, plan: MergePlan) -> Carry:
        """The way of one function of tokens, whose plan is ``plan``, to merged tokens and back.

        Args:
            name: of the function, the same at every call.
            plan: that ``plan`` gave for this call.
        """
        held = self._held
        assert held is not None  # it holds the plan
        return Carry(plan, name, held.memory, held.is_new)

    def _make(self, x: Tensor, grids: tuple[Grid, ...], block: str) -> Held | None:
        run, epoch = self._run, self._epoch
        layout = run.session.layout(grids, x.device)
        if layout.tokens != x.shape[1] or x.shape[0] % len(self._conditions) or epoch is None:
            run.report.aside(RESHAPED, block)
            return None
        if layout.is_identity:
            kind = "tokens" if layout.protected is None else "unprotected tokens"
            run.report.aside(f"too few {kind} to merge", block)
            return None
        held = run.session.plan(self._place, self._conditions, epoch, layout, x)
        if run.record is not None and held.is_new and not held.plan.is_identity:
            run.record.note(self._place.block, block, held.plan, held.runs_whole)
        return held


class Run:
    """State of one node during one sampling run; nothing of it outlives the run.

    Args:
        config: settings of the merge.
        schedule: of the run's sigmas.
        make_host: builds the host of a diffusion model; a run may use several, one per device.
        report: collects what happens.
        mask: ``(..., height, width)`` of the picture: where tokens never merge.
        record: keeps what merges, to be drawn; None where nobody wants it.
    """

    def __init__(
        self,
        config: MergeConfig,
        schedule: Schedule,
        make_host: HostFactory,
        report: Report,
        mask: Tensor | None = None,
        record: Recording | None = None,
    ) -> None:
        self.config = config
        self.session = Session(config, mask)
        self.report = report
        self.record = record
        self.chooses = False
        self._chosen: dict[tuple[Hashable, ...], Epoch] = {}
        self._schedule = schedule
        self._make_host = make_host
        self._hosts: dict[int, Host] = {}

    def epoch(self, call: Call) -> Epoch | None:
        """The epoch of a call, None where this node leaves the model alone."""
        return None if call.sigma is None else self._schedule.epoch(call.sigma)

    def spares(self, call: Call) -> bool:
        """True where a call stays whole only because it is of the run's last step."""
        return call.sigma is not None and self._schedule.spares(call.sigma)

    def overrides(self, model: nn.Module, call: Call, epoch: Epoch) -> list[Override]:
        """What the modules of ``model`` run instead of ``forward`` during a call."""
        host = self._host(model)
        if not host.sites:
            self.report.aside("the settings of this node leave every block alone")
        counted = self.session.count(call.arguments["x"].device)
        for site in host.sites:
            site.begin(call.conditions, epoch)
        if self.record is not None and call.sigma is not None:
            self.record.enter(self._schedule.step(call.sigma))
        # The first call of an epoch makes its plans, or the one before did and counted them now.
        self.chooses = counted or self._chosen.get(call.conditions) != epoch
        self._chosen[call.conditions] = epoch
        return host.overrides(call)

    def _host(self, model: nn.Module) -> Host:
        host = self._hosts.get(id(model))
        if host is None:
            host = self._hosts[id(model)] = self._make_host(model, self)
        return host

    @property
    def runs_whole(self) -> bool:
        """True where blocks of the current call run whole, so that detail can be kept of them."""
        return self.chooses and self.config.keep_detail

    def count(self, model: nn.Module, call: Call, merging: bool) -> None:
        """Tell the report what a call took, now that it is over, in which tokens merged or not."""
        host = self._host(model)
        known = {
            block: tokens
            for site in (host.sites if merging else ())
            if (tokens := site.tokens) is not None
            for block in site.blocks
        }
        try:
            work = host.work(call, known)
        except AttributeError:  # quantised modules of another make do not tell their shapes
            work = None
        self.report.works(work, samples=call.arguments["x"].shape[0])

    def close(self, finished: bool) -> None:
        """Say what happened, and drop every plan at once: hosts and the run know one another."""
        self.report.keeps(self.session.kept_bytes)
        self.report.close(finished)
        self._hosts.clear()
        self._chosen.clear()


class SamplingRun:
    """The runs of every node on one model: a later node takes over within its own range.

    Args:
        runs: in the order of the nodes.
    """

    def __init__(self, runs: list[Run]) -> None:
        self._runs = runs
        self._reader = CallReader()
        self._step: tuple[float, float, Step, Run | None] | None = None

    def calc_cond_batch(self, executor: Callable, *args: Any, **kwargs: Any) -> Any:
        """Wraps one prediction of the sampler, which may take several calls of the model."""
        self._reader.begin_evaluation()
        return executor(*args, **kwargs)

    def apply_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps one call of the model, around any compiled code."""
        call = self._reader.read(executor.original, args, kwargs)
        # A compiled model stands in for the true one; the blocks are the same objects.
        model = executor.class_obj.diffusion_model
        model = getattr(model, "_orig_mod", model)
        overrides: list[Override] = []
        active = None
        for run in reversed(self._runs):
            epoch = run.epoch(call)
            if epoch is None:
                continue
            if active is not None:
                run.report.aside("a later node takes over")
                continue
            overrides = run.overrides(model, call, epoch)
            active = run
        is_new_step = self._time(call.sigma, active)
        # Choosing breaks a compiled graph, and a single spared step is not worth one of its own.
        eager = active.chooses if active else any(run.spares(call) for run in self._runs)
        with overriding(overrides), UNCOMPILED if eager else nullcontext():
            result = executor(*args, **kwargs)
        for run in [active] if active else self._runs:
            run.count(model, call, merging=run is active)
        if is_new_step and active is not None:
            active.report.show()
        return result

    def _time(self, sigma: float | None, active: Run | None) -> bool:
        """Note how long the step before took; True when ``sigma`` begins a new one."""
        now = time.perf_counter()
        if sigma is None or (self._step is not None and self._step[0] == sigma):
            return False
        self._end_step(now)
        kind = Step.WHOLE if active is not None and active.runs_whole else Step.MERGED
        self._step = (sigma, now, kind, active)
        return True

    def _end_step(self, now: float) -> None:
        """Tell the reports how long the step took that ends at ``now``; none before the first."""
        if self._step is None:
            return
        _, since, kind, active = self._step
        self._step = None
        for run in [active] if active else self._runs:
            run.report.step(now - since, kind if active else Step.STOCK)

    def finish(self) -> None:
        """Say what happened in a run that came to its end, and drop every plan."""
        self._end_step(time.perf_counter())
        self._close(finished=True)

    def decline(self, reason: str) -> None:
        """Leave the model alone for the whole run, and say why."""
        for run in self._runs:
            run.report.aside(reason)
        self._close(finished=True)

    def close(self) -> None:
        """Drop every plan, and let calls of leftover wrappers pass; say what had merged if any."""
        self._close(finished=False)

    def _close(self, finished: bool) -> None:
        for run in self._runs:
            run.close(finished)
        self._runs.clear()
        self._step = None
