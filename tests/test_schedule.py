"""Steps from sigmas alone, and what they ask for."""

from __future__ import annotations

import torch
from comfyui_toma.toma_core.config import MergeConfig
from comfyui_toma.toma_core.plan import Place
from comfyui_toma.toma_core.regions import build_layout
from comfyui_toma.toma_core.schedule import Action, Epoch, Schedule
from comfyui_toma.toma_core.session import Session

SIGMAS = tuple(float(sigma) for sigma in range(10, -1, -1))


def schedule(sigmas=SIGMAS, start=float("inf"), end=float("-inf"), reuse=5, weights=2):
    return Schedule(sigmas, start, end, reuse, weights)


def actions(schedule, sigmas):
    """What a block with one pattern does at each sigma, in order."""
    done, held = [], None
    for sigma in sigmas:
        epoch = schedule.epoch(sigma)
        done.append(None if epoch is None else epoch.action(held))
        held = epoch or held
    return done


def test_destinations_every_fifth_step_and_weights_every_second_between():
    select, reweight, reuse = Action.SELECT, Action.REWEIGHT, Action.REUSE
    assert actions(schedule(), SIGMAS[:-1]) == 2 * [select, reuse, reweight, reuse, reweight]


def test_calls_do_not_count():
    """Heun, PAG and SAG call the model more than once per sigma."""
    once = schedule()
    assert [once.epoch(sigma) for sigma in SIGMAS[:-1]] == [
        once.epoch(sigma) for sigma in SIGMAS[:-1] for _ in range(3)
    ][::3]


def test_sigmas_between_steps_belong_to_the_nearest():
    assert schedule().step(8.6) == 1
    assert schedule().step(8.5) == 1
    assert schedule().step(8.4) == 2
    assert schedule().step(0.0) == 9
    assert schedule().step(99.0) == 0


def test_outside_the_range_nothing_merges_and_the_first_step_inside_selects():
    ranged = schedule(start=7.5, end=3.0)
    assert [ranged.epoch(sigma) is not None for sigma in SIGMAS[:-1]] == (
        3 * [False] + 4 * [True] + 3 * [False]
    )
    assert ranged.epoch(7.0) == Epoch(0, 0)


def test_the_last_step_is_spared_where_asked_also_between_its_sigmas():
    spared = Schedule(SIGMAS, float("inf"), float("-inf"), 2, 2, spares_last=True)
    assert [spared.epoch(sigma) is None for sigma in SIGMAS[:-1]] == 9 * [False] + [True]
    assert spared.epoch(0.6) is None and spared.epoch(1.6) is not None
    assert [spared.spares(sigma) for sigma in SIGMAS[:-1]] == 9 * [False] + [True]
    assert not schedule(start=7.5, end=3.0).spares(SIGMAS[-2])
    unknown = Schedule((), float("inf"), float("-inf"), 2, 2, spares_last=True)
    assert unknown.epoch(1.0) is not None and not unknown.spares(1.0)


def test_rising_sigmas_count_as_steps_too():
    rising = schedule(sigmas=SIGMAS[::-1])
    assert [rising.step(sigma) for sigma in SIGMAS[::-1][:-1]] == list(range(10))


def test_without_known_sigmas_each_new_one_is_a_step():
    unknown = schedule(sigmas=())
    assert [unknown.step(sigma) for sigma in (9.0, 9.0, 4.0, 9.0, 2.0)] == [0, 0, 1, 0, 2]


def test_a_session_plans_each_condition_by_itself():
    """Joint or apart, in any order, a condition gets the plan it would get alone."""
    config = MergeConfig(tile_size=4)
    layout = build_layout(((8, 8),), config)
    features = {key: torch.randn(2, 64, 6) for key in "ab"}
    epoch, site = Epoch(0, 0), Place()
    apart, joint = Session(config), Session(config)
    alone = {key: apart.plan(site, (key,), epoch, layout, features[key]).plan for key in "ba"}
    x = torch.cat((features["a"], features["b"]))
    both = joint.plan(site, ("a", "b"), epoch, layout, x).plan
    assert torch.equal(both.merge_weights[:2], alone["a"].merge_weights)
    assert torch.equal(both.merge_weights[2:], alone["b"].merge_weights)
    # Grouped anew within the epoch, the held plans serve again, whatever the features are now.
    again = joint.plan(site, ("b",), epoch, layout, torch.randn(2, 64, 6)).plan
    assert torch.equal(again.merge_weights, alone["b"].merge_weights)


def test_a_session_holds_plans_for_their_epoch_only():
    config = MergeConfig(tile_size=4)
    layout = build_layout(((8, 8),), config)
    session, site = Session(config), Place()
    x = torch.randn(1, 64, 6)
    plan = session.plan(site, ("a",), Epoch(0, 0), layout, x).plan
    assert session.held(site, ("a",), Epoch(0, 0)).plan is plan
    assert session.held(site, ("a",), Epoch(0, 1)) is None
    moved = torch.randn(1, 64, 6)
    reweighed = session.plan(site, ("a",), Epoch(0, 1), layout, moved).plan
    assert torch.equal(reweighed.destinations, plan.destinations)
    assert not torch.equal(reweighed.merge_weights, plan.merge_weights)
    selected = session.plan(site, ("a",), Epoch(1, 0), layout, moved).plan
    assert not torch.equal(selected.destinations, plan.destinations)
