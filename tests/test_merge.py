"""Merge and unmerge against dense matrices, and numbers that a reader can check."""

from __future__ import annotations

import pytest
import torch
from comfyui_toma.toma_core.config import MergeConfig
from comfyui_toma.toma_core.plan import join_plans
from comfyui_toma.toma_core.planning import build_plan, reweigh
from comfyui_toma.toma_core.regions import build_layout

GRIDS = [((8, 8),), ((7, 13),), ((16, 9), (5, 4)), ((1, 30),), ((45, 37),)]


def make_plan(grids, batch=2, channels=6, seed=0, **config):
    config = MergeConfig(tile_size=4, **config)
    layout = build_layout(grids, config)
    x = torch.randn(batch, layout.tokens, channels, generator=torch.Generator().manual_seed(seed))
    return build_plan(x, layout, config), x, config


def dense_assignment(plan, x, temperature):
    """A of the paper as one ``(merged, tokens)`` matrix per sample, from its definition."""
    positions = plan.positions()
    units = torch.nn.functional.normalize(x, dim=-1)
    region = torch.empty(plan.tokens, dtype=torch.long)
    for number, (index, valid) in enumerate(zip(plan.layout.index, plan.layout.valid, strict=True)):
        region[index[valid]] = number
    matrices = []
    for sample in range(plan.batch):
        at = positions[sample]
        scores = units[sample, at] @ units[sample].T / temperature
        scores[torch.arange(len(at)), at] = 1 / temperature
        scores[region[at][:, None] != region[None]] = -torch.inf
        matrices.append(scores.softmax(0))
    return torch.stack(matrices)


@pytest.mark.parametrize("grids", GRIDS)
@pytest.mark.parametrize("region", ["tile", "stripe", "global"])
@pytest.mark.parametrize("temperature", [1e-3, 0.1])
def test_equals_dense_matrices(grids, region, temperature):
    plan, x, _ = make_plan(grids, region=region, temperature=temperature)
    a = dense_assignment(plan, x, temperature)
    torch.testing.assert_close(a.sum(1), torch.ones(plan.batch, plan.tokens))
    merged = plan.merge(x)
    torch.testing.assert_close(merged, (a / a.sum(-1, keepdim=True)) @ x, atol=1e-4, rtol=1e-4)
    y = torch.randn_like(merged)
    torch.testing.assert_close(plan.unmerge(y), a.transpose(1, 2) @ y, atol=1e-4, rtol=1e-4)


def test_each_sample_has_its_own_destinations():
    plan, x, config = make_plan(((12, 12),), batch=3)
    assert not torch.equal(plan.positions()[0], plan.positions()[1])
    for sample in range(3):
        alone = build_plan(x[sample : sample + 1], plan.layout, config)
        assert torch.equal(alone.positions()[0], plan.positions()[sample])
        torch.testing.assert_close(alone.merge(x[sample : sample + 1])[0], plan.merge(x)[sample])


def test_positions_are_distinct_and_inside_the_sequence():
    for grids in GRIDS:
        plan, _, _ = make_plan(grids, ratio=0.4)
        for positions in plan.positions():
            assert len(positions.unique()) == plan.merged
            assert 0 <= positions.min() and positions.max() < plan.tokens


def test_a_hard_assignment_is_undone_by_its_transpose():
    """Merging what was unmerged gives it back: A~ A^T = 1 (papers, pseudo-inverse)."""
    config = MergeConfig(tile_size=4)
    layout = build_layout(((8, 12),), config)
    # Eight directions per tile, two tokens each: every assignment is hard.
    x = torch.eye(8).repeat(layout.tokens // 8, 1)[None] + 0.01 * torch.randn(2, layout.tokens, 8)
    plan = build_plan(layout.join(x.reshape(2, layout.regions, 16, 8)), layout, config)
    y = torch.randn(2, plan.merged, 5)
    torch.testing.assert_close(plan.merge(plan.unmerge(y)), y)


def test_two_pairs_of_equal_tokens_merge_without_loss():
    config = MergeConfig(tile_size=4, ratio=0.5)
    layout = build_layout(((1, 4),), config)
    x = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 4.0]]])
    plan = build_plan(x, layout, config)
    # Destinations 0 and 1; token 2 points where 0 does, token 3 where 1 does.
    assert plan.positions().tolist() == [[0, 1]]
    assert plan.merge(x).tolist() == [[[2.0, 0.0], [0.0, 3.0]]]
    assert plan.groups().tolist() == [[0, 1, 0, 1]]
    assert plan.unmerge(plan.merge(x)).tolist() == [
        [[2.0, 0.0], [0.0, 3.0], [2.0, 0.0], [0.0, 3.0]]
    ]


def test_text_passes_through_whole():
    plan, x, _ = make_plan(((8, 8),))
    text = torch.randn(2, 5, 6)
    sequence = torch.cat((text, x), 1)
    merged = plan.merge(sequence, prefix=5)
    assert torch.equal(merged[:, :5], text)
    assert torch.equal(merged[:, 5:], plan.merge(x))
    whole = plan.unmerge(merged, prefix=5)
    assert torch.equal(whole[:, :5], text)
    assert torch.equal(whole[:, 5:], plan.unmerge(merged[:, 5:]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_computed_in_fp32_and_applied_in_the_models_dtype(dtype):
    config = MergeConfig(tile_size=4)
    layout = build_layout(((8, 8),), config)
    x = torch.randn(1, 64, 640)
    x[:, 3] = 0
    x[:, 8:16] *= 3000
    plan = build_plan(x.to(dtype), layout, config)
    exact = build_plan(x.to(dtype).float(), layout, config)
    assert plan.merge_weights.dtype == dtype
    assert torch.equal(plan.destinations, exact.destinations)
    assert torch.equal(plan.merge_weights, exact.merge_weights.to(dtype))
    merged = plan.merge(x.to(dtype))
    assert merged.dtype == dtype and torch.isfinite(plan.unmerge(merged)).all()


def test_zero_and_equal_tokens_keep_every_destination_in_its_own_group():
    config = MergeConfig(tile_size=4)
    layout = build_layout(((4, 8),), config)
    for x in (torch.zeros(1, 32, 6), torch.ones(1, 32, 6)):
        plan = build_plan(x, layout, config)
        assert torch.isfinite(plan.merge(x)).all()
        assert (plan.merge_weights.float().sum(-1) > 0.99).all()


def test_reweighing_keeps_destinations_and_follows_the_features():
    plan, x, config = make_plan(((8, 8),))
    moved = x + 0.5 * torch.randn_like(x)
    renewed = reweigh(plan, moved, config)
    assert torch.equal(renewed.destinations, plan.destinations)
    assert not torch.equal(renewed.merge_weights, plan.merge_weights)
    assert torch.equal(reweigh(plan, x, config).merge_weights, plan.merge_weights)


def test_joined_plans_act_sample_by_sample():
    first, x, _ = make_plan(((8, 8),), seed=1)
    second, y, config = make_plan(((8, 8),), seed=2)
    second = build_plan(y, first.layout, config)
    joined = join_plans([first, second])
    both = torch.cat((x, y))
    assert joined.fits(both) and not joined.fits(x)
    torch.testing.assert_close(joined.merge(both), torch.cat((first.merge(x), second.merge(y))))


def test_a_grid_too_small_to_merge_is_the_identity():
    assert build_layout(((1, 1),), MergeConfig(ratio=0.9)).is_identity
    assert build_layout(((9, 9),), MergeConfig(tile_size=1)).is_identity
    assert build_layout(((9, 9),), MergeConfig(ratio=0.001)).is_identity
