"""Facility location against a slow oracle, brute force and toy numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from comfyui_toma.toma_core.selection import (
    EPSILON,
    EXACT_TOKENS,
    choose_destinations,
    facility_location,
    similarity,
    stochastic_facility_location,
    unit_rows,
)


def oracle(cosine, count, valid=None):
    """Greedy facility location, written as loops over the formula."""
    tokens = range(len(cosine))
    alive = [token for token in tokens if valid is None or valid[token]]
    cover = {token: -1.0 for token in alive}
    picks = []
    for _ in range(min(count, len(alive))):
        gains = {
            i: sum(max(0.0, float(cosine[i, j]) - cover[j]) for j in alive)
            for i in alive
            if i not in picks
        }
        best = max(gains.values())
        pick = min(i for i, gain in gains.items() if gain == best)
        picks.append(pick)
        cover = {j: max(cover[j], float(cosine[pick, j])) for j in alive}
    return picks


def dyadic(tokens, seed):
    """A symmetric similarity of sixteenths: sums are exact, so ties are true ties."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(-16, 17, (tokens, tokens), generator=generator) / 16
    cosine = torch.triu(half, 1)
    return cosine + cosine.T + torch.eye(tokens)


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_loop_oracle_with_ties(seed):
    cosine = dyadic(12, seed)
    for count in (1, 5, 12):
        assert facility_location(cosine, count).tolist() == oracle(cosine, count)


def test_batches_and_regions_are_independent():
    cosines = torch.stack([dyadic(9, seed) for seed in range(6)]).reshape(2, 3, 9, 9)
    picks = facility_location(cosines, 4)
    for sample, region in itertools.product(range(2), range(3)):
        assert picks[sample, region].tolist() == oracle(cosines[sample, region], 4)


def test_padding_is_neither_picked_nor_represented():
    cosine = dyadic(10, 3)
    valid = torch.tensor([True, False, True, True, False, True, True, True, False, True])
    assert facility_location(cosine, 7, valid).tolist() == oracle(cosine, 7, valid)


def test_all_equal_tokens_are_picked_in_order_and_never_twice():
    assert facility_location(torch.ones(6, 6), 6).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(10))
def test_reaches_the_guarantee_of_greedy(seed):
    """Within (1 - 1/e) of the best set for a non-negative similarity, found by brute force."""
    generator = torch.Generator().manual_seed(seed)
    cosine = similarity(unit_rows(torch.rand(8, 5, generator=generator)))
    for count in (1, 2, 3):
        picks = facility_location(cosine, count)
        best = max(
            cosine[list(chosen)].amax(0).sum() for chosen in itertools.combinations(range(8), count)
        )
        assert cosine[picks].amax(0).sum() >= (1 - 1 / math.e) * best


def test_gains_never_increase():
    generator = torch.Generator().manual_seed(0)
    cosine = similarity(unit_rows(torch.randn(40, 8, generator=generator)))
    picks = facility_location(cosine, 20)
    worth = [cosine[picks[: n + 1]].amax(0).sum() for n in range(20)]
    gains = torch.tensor(worth).diff()
    assert (gains.diff() <= 1e-5).all()


def test_a_reader_can_check_this_by_hand():
    """Two clusters on a line of directions: one destination for each."""
    x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [0.0, 2.0]])
    picks = facility_location(similarity(unit_rows(x)), 2)
    assert sorted(picks.tolist()) in ([0, 2], [1, 3], [0, 3], [1, 2], [1, 4], [0, 4])
    assert {int(pick) < 2 for pick in picks} == {True, False}


def test_zero_rows_and_large_half_precision_rows_stay_finite():
    x = torch.cat((torch.zeros(2, 640), 3000 * torch.randn(6, 640))).half()
    units = unit_rows(x)
    assert units.dtype == torch.float32 and torch.isfinite(units).all()
    cosine = similarity(units)
    assert torch.equal(cosine.diagonal(), torch.ones(8))
    assert cosine[0, 1:].abs().max() == 0


@pytest.mark.parametrize("count", [0, 7])
@pytest.mark.parametrize("choose", [facility_location, stochastic_facility_location])
def test_an_impossible_count_is_refused(choose, count):
    with pytest.raises(ValueError, match="count must be from 1 to 6"):
        choose(torch.ones(6, 6), count)


def stochastic_oracle(cosine, count, valid):
    """The same draws as the batched form, written as loops."""
    left = [token for token in range(len(cosine)) if valid[token]]
    alive = list(left)
    handful = min(len(cosine), math.ceil(len(cosine) / count * math.log(1 / EPSILON)))
    draws = torch.randint(2**31, (count, handful), generator=torch.Generator().manual_seed(0))
    cover = {token: -1.0 for token in alive}
    picks = []
    for draw in draws.tolist()[: len(alive)]:
        places = [number % len(left) for number in draw]
        gains = [
            sum(max(0.0, float(cosine[left[place], j]) - cover[j]) for j in alive)
            for place in places
        ]
        place = places[gains.index(max(gains))]
        picks.append(left[place])
        cover = {j: max(cover[j], float(cosine[left[place], j])) for j in alive}
        left[place] = left[-1]
        left.pop()
    return picks + [0] * (count - len(picks))


@pytest.mark.parametrize("count", [1, 4, 9, 12])
def test_stochastic_greedy_equals_its_oracle_sample_by_sample(count):
    cosines = torch.stack([dyadic(12, seed) for seed in range(6)]).reshape(2, 3, 12, 12)
    valid = torch.ones(3, 12, dtype=torch.bool)
    valid[1, ::2] = False
    valid[2, 11] = False
    picks = stochastic_facility_location(cosines, count, valid)
    for sample, region in itertools.product(range(2), range(3)):
        expected = stochastic_oracle(cosines[sample, region], count, valid[region])
        assert picks[sample, region].tolist() == expected


def test_stochastic_greedy_leaves_the_global_generator_alone():
    cosine = similarity(unit_rows(torch.randn(300, 8)))
    state = torch.get_rng_state()
    picks = stochastic_facility_location(cosine, 150)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert torch.equal(stochastic_facility_location(cosine, 150), picks)
    assert len(picks.unique()) == 150


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_stochastic_greedy_loses_less_than_two_percent(ratio):
    """A smooth field with noise upon it, as activations of a picture are."""
    coarse = torch.randn(1, 32, 6, 6, generator=torch.Generator().manual_seed(1))
    field = torch.nn.functional.interpolate(coarse, scale_factor=4, mode="bicubic")
    field = field + 0.3 * torch.randn(field.shape, generator=torch.Generator().manual_seed(2))
    cosine = similarity(unit_rows(field.flatten(2).squeeze(0).T))
    count = round((1 - ratio) * len(cosine))
    exact, few = (
        cosine[choose(cosine, count)].amax(0).sum()
        for choose in (facility_location, stochastic_facility_location)
    )
    assert few >= 0.98 * exact


def test_small_regions_are_chosen_exactly_and_large_ones_are_not():
    cosine = similarity(unit_rows(torch.randn(EXACT_TOKENS + 1, 8)))
    for tokens, choose in (
        (EXACT_TOKENS, facility_location),
        (EXACT_TOKENS + 1, stochastic_facility_location),
    ):
        part = cosine[:tokens, :tokens]
        assert torch.equal(choose_destinations(part, 20), choose(part, 20))
