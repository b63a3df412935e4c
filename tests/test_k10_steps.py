"""Kind K10 of public reports: a pattern's age is told by sigmas, never by counting calls.

Every model call is watched from inside the model: its sigma, the patterns that are made in it and
those that are used. What must happen then follows from the run's sigmas by plain arithmetic.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import small
import tiny
import torch
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_easycache import EasyCacheNode
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.run import Site
from comfyui_toma.nodes.token_merge import METHODS
from comfyui_toma.nodes.toma import ToMAPatchFlux, ToMAPatchModel, ToMAPatchSDXL
from comfyui_toma.toma_core import session
from comfyui_toma.toma_core.config import MergeConfig
from comfyui_toma.toma_core.groups import GroupPlan
from matrix import matrix
from merging import SCOPES, config_of

SAMPLERS = [
    "euler",
    "euler_ancestral",
    "heun",
    "dpmpp_2s_ancestral",
    "dpmpp_sde",
    "dpmpp_2m",
    "uni_pc",
    "lcm",
]
REUSE, WEIGHTS = 5, 2


@dataclass
class Watch:
    """What happens in the calls of a model, in order.

    Attributes:
        calls: sigma of every call and the sigmas of its run.
        chosen, weighed: number of the call in which each pattern was chosen or weighed anew.
        used: number of the call, and the pattern, of every use by a block.
        born: by identity, the call in which a pattern was put together, and the pattern.
    """

    calls: list[tuple[float, tuple[float, ...]]] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    weighed: list[int] = field(default_factory=list)
    used: list[tuple[int, Any]] = field(default_factory=list)
    born: dict[int, tuple[int, Any]] = field(default_factory=dict)

    def epoch(self, call: int) -> tuple[int, int]:
        """Which choice and which weights a call must use: steps of its sigma, in intervals."""
        sigma, sigmas = self.calls[call]
        steps = sigmas[:-1]
        step = min(range(len(steps)), key=lambda number: abs(steps[number] - sigma))
        return step // REUSE, step % REUSE // WEIGHTS


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()

    def note(function, calls):
        def noted(*args):
            calls.append(len(watch.calls) - 1)
            return function(*args)

        return noted

    monkeypatch.setattr(session, "build_plan", note(session.build_plan, watch.chosen))
    monkeypatch.setattr(session, "reweigh", note(session.reweigh, watch.weighed))
    put_together, take = session.Session.plan, Site.plan

    def plan_of_session(self, *args):
        held = put_together(self, *args)
        # Kept alive, so that no other pattern gets its identity.
        watch.born.setdefault(id(held.plan), (len(watch.calls) - 1, held.plan))
        return held

    def plan_of_site(self, *args):
        plan = take(self, *args)
        if plan is not None:
            watch.used.append((len(watch.calls) - 1, plan))
        return plan

    monkeypatch.setattr(session.Session, "plan", plan_of_session)
    monkeypatch.setattr(Site, "plan", plan_of_site)
    return watch


def watched(model, watch):
    """The model, telling of each call before its blocks run."""

    def before_blocks(executor, *args, **kwargs):
        options = next(
            a for a in (*args, *kwargs.values()) if isinstance(a, dict) and "sigmas" in a
        )
        sigmas = tuple(float(sigma) for sigma in options["sample_sigmas"])
        watch.calls.append((float(options["sigmas"][0]), sigmas))
        return executor(*args, **kwargs)

    patched = model.clone()
    patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "watch", before_blocks)
    return patched


def patterns_per_choice(kind, way="block"):
    """Sites of the model: one per spatial transformer, one each for double and single blocks; where
    tokens are matched in pairs, one per block."""
    of_toma, of_pairs = {"sdxl": (7, 7), "flux": (2, 5)}[kind]
    return of_toma if way in SCOPES else of_pairs


def assert_refreshed_by_sigma(watch, sites, way="block"):
    epochs = [watch.epoch(call) for call in range(len(watch.calls))]
    first_of_choice = [n for n, e in enumerate(epochs) if e[0] not in {p[0] for p in epochs[:n]}]
    first_of_weights = [
        n for n, e in enumerate(epochs) if e not in epochs[:n] and n not in first_of_choice
    ]
    # A choice is made at the first call of its steps and at no other, whatever the sampler does.
    assert watch.chosen == [call for call in first_of_choice for _ in range(sites)]
    assert watch.weighed == [call for call in first_of_weights for _ in range(sites)]
    # No block ever uses a pattern of other steps.
    # What CA-ToMe finds serves from the next call on, and the find before it so long.
    late = first_of_choice if way == "CA-ToMe" else []
    assert watch.used or len(watch.calls) == len(late) == 1
    for call, plan in watch.used:
        # Without weights a pattern is as old as its choice.
        parts = 1 if isinstance(plan, GroupPlan) else 2
        served = call - 1 if call in late else call
        assert epochs[watch.born[id(plan)][0]][:parts] == epochs[served][:parts]


@pytest.mark.parametrize(
    ("kind", "way", "sampler", "steps", "denoise"),
    matrix(
        itertools.product(["sdxl", "flux"], ["block", *METHODS], SAMPLERS, [1, 2, 20], [1.0, 0.3]),
        every=12,
    ),
)
def test_patterns_are_renewed_at_the_same_sigmas_by_every_sampler(
    kind, way, sampler, steps, denoise, watch
):
    config = config_of(way, reuse_interval=REUSE, weight_interval=WEIGHTS, tile_size=4)
    model = watched(attach(small.MODELS[kind](), config), watch)
    image = tiny.sample(
        model, 12, 8, steps=steps, denoise=denoise, sampler=sampler, cfg=1.0, batch=1
    )
    assert torch.isfinite(image).all()
    assert_refreshed_by_sigma(watch, patterns_per_choice(kind, way), way)


@pytest.mark.parametrize("scheduler", ["karras", "sgm_uniform", "exponential", "ddim_uniform"])
def test_the_schedule_of_sigmas_does_not_matter_either(scheduler, watch):
    config = MergeConfig(reuse_interval=REUSE, weight_interval=WEIGHTS, scope="modules")
    model = watched(attach(small.flux(), config), watch)
    tiny.sample(model, 12, 8, steps=12, scheduler=scheduler, sampler="heun")
    assert_refreshed_by_sigma(watch, patterns_per_choice("flux"))


def test_heun_makes_as_many_choices_as_euler(watch):
    """Twice the calls, the same steps."""
    counts, calls = [], []
    for sampler in ("euler", "heun"):
        model = watched(attach(small.flux(), MergeConfig(reuse_interval=5)), watch)
        tiny.sample(model, 12, 8, steps=10, sampler=sampler)
        counts.append(len(watch.chosen) - sum(counts))
        calls.append(len(watch.calls) - sum(calls))
    assert calls == [10, 19]
    assert counts == [2 * patterns_per_choice("flux")] * 2


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
@pytest.mark.parametrize("steps", [2, 6])
def test_easycache_with_heun_runs_and_both_have_their_effect(kind, steps):
    """Report 74: evaluations counted as steps, and a division by zero if all are skipped."""
    model = small.MODELS[kind]()

    def cached(model, threshold):
        return EasyCacheNode.execute(model, threshold, 0.0, 1.0, False)[0]

    def sampled(model):
        return tiny.sample(model, steps=steps, sampler="heun")

    for threshold in (0.0, 100.0):
        both = sampled(cached(attach(model, MergeConfig()), threshold))
        assert torch.isfinite(both).all()
        assert torch.equal(both, sampled(attach(cached(model, threshold), MergeConfig())))
        assert not torch.equal(both, sampled(cached(model, threshold)))


@pytest.mark.parametrize("node", [ToMAPatchModel, ToMAPatchSDXL, ToMAPatchFlux])
def test_no_node_asks_for_the_number_of_steps(node):
    """Report 76: a `steps` widget that differs from the sampler's."""
    names = {each.id for each in node.define_schema().inputs}
    assert names and not any("steps" in name for name in names)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_part_of_the_sampling_range_is_kept_to_by_samplers_of_many_calls(kind, watch):
    """Between two percentages patterns are used, outside of them none, also for a call that
    looks ahead past the border."""
    config = MergeConfig(start_percent=0.3, end_percent=0.7)
    model = small.MODELS[kind]()
    to_sigma = model.get_model_object("model_sampling").percent_to_sigma
    low, high = float(to_sigma(0.7)), float(to_sigma(0.3))
    tiny.sample(watched(attach(model, config), watch), 12, 8, steps=9, sampler="heun")
    merged = {call for call, _ in watch.used}
    inside = {n for n, (sigma, _) in enumerate(watch.calls) if low < sigma <= high}
    assert merged == inside
    assert 0 < len(inside) < len(watch.calls)
