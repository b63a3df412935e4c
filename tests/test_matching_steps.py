"""When pairs are matched anew: lists of steps, and the settings that go with them."""

from __future__ import annotations

import pytest
from comfyui_toma.toma_core.config import Matching, MergeConfig, Method, Scope
from comfyui_toma.toma_core.schedule import BEST_STEPS, Epoch, Schedule, parse_steps

BEST = (0, 8, 11, 13, 20, 25, 30, 35, 45, 46, 47, 48, 49)


def schedule(steps, listed, start=float("inf")):
    sigmas = tuple(float(sigma) for sigma in range(steps, -1, -1))
    return Schedule(sigmas, start, float("-inf"), 1, 1, listed), sigmas[:-1]


def matchings(steps, listed):
    """Steps at which the choice changes."""
    plan, sigmas = schedule(steps, listed)
    epochs = [plan.epoch(sigma) for sigma in sigmas]
    return [step for step in range(steps) if step == 0 or epochs[step] != epochs[step - 1]]


def test_lists_are_read():
    assert parse_steps(BEST_STEPS) == BEST
    assert parse_steps("every 5") == parse_steps(" Every  5 ") == tuple(range(0, 50, 5))
    assert parse_steps(" 3, 1 - 2 ,2") == parse_steps("1-3,") == (1, 2, 3)
    assert parse_steps("every 1") == parse_steps("0-49") == tuple(range(50))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", '"" is neither a step'),
        ("0,,3", '"" is neither a step'),
        ("0;8", '"0;8" is neither a step'),
        ("0,8,fifty", '"fifty" is neither a step'),
        ("0,50", "50 is beyond step 49"),
        ("45-60", "60 is beyond step 49"),
        ("9-3", '"9-3" falls, write it as 3-9'),
        ("-1", '"-1" is neither a step'),
        ("1.5", '"1.5" is neither a step'),
        ("every 0", "every 0 is not from 1 to 49"),
        ("every 50", "every 50 is not from 1 to 49"),
        ("every other", '"every other" is neither a step'),
    ],
)
def test_a_wrong_list_is_answered_with_the_accepted_form(text, problem):
    with pytest.raises(ValueError) as caught:
        parse_steps(text)
    message = str(caught.value)
    assert f'"{BEST_STEPS}", or "every 5"' in message and f'got "{text}"' in message
    assert problem in message


def test_fifty_steps_match_thirteen_times_exactly_where_the_list_says():
    assert matchings(50, BEST) == list(BEST)


def test_a_list_is_scaled_to_the_run():
    assert matchings(25, BEST) == [0, 4, 5, 6, 10, 12, 15, 17, 22, 23, 24]
    assert matchings(100, BEST) == [2 * step for step in BEST]
    assert matchings(1, BEST) == [0]
    assert matchings(10, parse_steps("every 5")) == list(range(10))


def test_step_zero_is_the_first_step_and_the_first_merging_step_always_matches():
    plan, sigmas = schedule(50, (0, 8))
    assert plan.epoch(sigmas[0]) == Epoch(1, 0)
    late, sigmas = schedule(50, (0, 8), start=45.0)
    assert late.epoch(sigmas[4]) is None
    assert late.epoch(sigmas[5]).action(None).name == "SELECT"
    assert late.epoch(sigmas[7]) == late.epoch(sigmas[5]) != late.epoch(sigmas[8])


def test_calls_between_steps_belong_to_the_nearest():
    plan, _ = schedule(50, BEST)
    assert plan.epoch(41.8) == plan.epoch(42.0) != plan.epoch(43.0)


def test_without_known_sigmas_the_list_counts_new_ones():
    plan = Schedule((), float("inf"), float("-inf"), 1, 1, (0, 2))
    assert [plan.epoch(sigma).selection for sigma in (9.0, 9.0, 7.0, 5.0, 4.0)] == [1, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Matching("ToMa"), "method must be one of ToMA, CA-ToMe, ToMe, ToFu, got 'ToMa'"),
        (lambda: Matching("ToMA"), "Leave matching out"),
        (lambda: Matching(threshold=1.1), "threshold must be from 0.0 to 1.0, got 1.1"),
        (lambda: Matching(seed=-1), "seed must be from 0 to"),
        (lambda: MergeConfig(matching=Matching()), "CA-ToMe works on self-attention alone"),
        (lambda: MergeConfig(merge_queries_only=True), "Set scope to attention"),
        (
            lambda: MergeConfig(ratio=0.8, scope="attention", matching=Matching("ToMe")),
            "ratio must be at most 0.75 with ToMe.*got 0.8",
        ),
        (lambda: MergeConfig(selection_steps=(0, 50)), "selection_steps must be from 0 to 49"),
    ],
)
def test_a_bad_setting_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_zero_ratio_and_full_threshold_are_the_identity():
    def config(method, **values):
        ratio = values.pop("ratio", 0.5)
        return MergeConfig(ratio, scope=Scope.ATTENTION, matching=Matching(method, **values))

    assert config("ToMe", ratio=0.0).is_identity and config("ToFu", ratio=0.0).is_identity
    assert config("CA-ToMe", threshold=1.0).is_identity
    assert not config("CA-ToMe", ratio=0.0).is_identity
    assert not config("ToMe", threshold=1.0).is_identity
    assert config("ToFu").method is Method.TOFU and MergeConfig().method is Method.TOMA
