"""The protect mask: its tokens never merge, whatever the size, the ratio and the model."""

from __future__ import annotations

import probe
import pytest
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.toma_core.config import MergeConfig, Region
from comfyui_toma.toma_core.planning import build_plan, lay_out
from comfyui_toma.toma_core.selection import choose_destinations, similarity, unit_rows

REGIONS = list(Region)


def mask_of(rows, columns, value=1.0, height=96, width=64):
    """A mask of a picture whose given rows and columns (in shares of it) are protected."""
    mask = torch.zeros(1, height, width)
    top, bottom = (int(share * height) for share in rows)
    left, right = (int(share * width) for share in columns)
    mask[:, top:bottom, left:right] = value
    return mask


@pytest.mark.parametrize("keep_detail", [False, True])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("grid", [(24, 16), (13, 9)])
@pytest.mark.parametrize("region", REGIONS)
def test_every_protected_token_is_a_destination_of_its_own(region, grid, ratio, keep_detail):
    config = MergeConfig(ratio=ratio, region=region, tile_size=4, keep_detail=keep_detail)
    layout = lay_out((grid, (3, 3)), config, mask=mask_of((0.25, 0.6), (0.5, 1.0)))
    rows, columns = grid
    x = torch.randn(2, rows * columns + 9, 8, generator=torch.Generator().manual_seed(0))
    plan = build_plan(x, layout, config)
    token = torch.arange(rows * columns).reshape(grid)
    inside = token[-(-rows // 4) : int(0.6 * rows), -(-columns // 2) :].flatten()
    assert len(inside) > 8
    for positions in plan.positions():
        assert torch.isin(inside, positions).all()
        assert len(positions.unique()) == plan.merged
    assert torch.equal(plan.unmerge(plan.merge(x))[:, inside], x[:, inside])


def test_the_number_of_tokens_left_grows_only_where_protection_needs_it():
    config = MergeConfig(ratio=0.5, tile_size=4)
    grid = ((8, 8),)
    free = lay_out(grid, config)
    part = lay_out(grid, config, mask=mask_of((0.0, 0.25), (0.0, 0.5)))
    assert part.merged == free.merged + 1  # 8 of the 16 tokens of one tile, one for the rest
    few = lay_out(grid, config, mask=mask_of((0.0, 0.125), (0.0, 0.5)))
    assert few.merged == free.merged
    tile = lay_out(grid, config, mask=mask_of((0.0, 0.5), (0.0, 0.5)))
    assert tile.merged == free.merged + 8
    nearly = lay_out(grid, config, mask=mask_of((0.0, 0.5), (0.0, 0.375)))
    assert nearly.merged == free.merged + 5  # 12 protected, one for the four others


@pytest.mark.parametrize("tokens", [48, 1100])
def test_the_rest_is_chosen_to_go_with_the_protected(tokens):
    """No unprotected pick is wasted next to a protected token."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 1, tokens // 2, 6, generator=generator).repeat(1, 1, 2, 1)
    required = torch.zeros(1, 1, tokens, dtype=torch.bool)
    required[..., : tokens // 2 : 2] = True
    count = tokens // 2
    cosine = similarity(unit_rows(x))
    picks = choose_destinations(cosine, count, None, required)
    assert torch.equal(picks[0, 0, : tokens // 4], torch.arange(0, tokens // 2, 2))
    assert len(picks.unique()) == count
    twins = picks[0, 0, tokens // 4 :] % (tokens // 2)
    # the first half as many picks stand for tokens that no protected one equals
    wasted = (twins % 2 == 0).float().mean()
    assert wasted < 0.1


def test_without_protection_the_choice_is_what_it_was():
    x = torch.randn(2, 3, 16, 5, generator=torch.Generator().manual_seed(3))
    cosine = similarity(unit_rows(x))
    none = torch.zeros(3, 16, dtype=torch.bool)
    assert torch.equal(choose_destinations(cosine, 7), choose_destinations(cosine, 7, None, none))


@pytest.mark.parametrize("make", [tiny.sdxl, tiny.flux])
def test_a_mask_over_everything_leaves_the_model_stock(make):
    model = make()
    patched = attach(model, MergeConfig(), mask=torch.ones(1, 50, 70))
    with probe.token_spy(model) as seen:
        merged = tiny.sample(patched, 24, 16)
    whole = {part: list(counts) for part, counts in seen.items()}
    assert torch.equal(merged, tiny.sample(model, 24, 16))
    with probe.token_spy(model) as seen:
        tiny.sample(model, 24, 16)
    assert whole == seen


@pytest.mark.parametrize("make", [tiny.sdxl, tiny.flux])
def test_an_empty_mask_changes_nothing(make):
    model = make()
    plain = tiny.sample(attach(model, MergeConfig()), 24, 16)
    masked = attach(model, MergeConfig(), mask=torch.zeros(24, 16))
    assert torch.equal(tiny.sample(masked, 24, 16), plain)


@pytest.mark.parametrize("make", [tiny.sdxl, tiny.flux])
def test_protection_follows_the_size_of_the_picture(make):
    """One MODEL, two passes: the mask is that of the picture, not of its pixels."""
    model = make()
    patched = attach(model, MergeConfig(tile_size=4), mask=mask_of((0, 1), (0, 0.5)))
    free = attach(model, MergeConfig(tile_size=4))
    for size in ((24, 16), (48, 32)):
        counts = []
        for each in (patched, free, model):
            with probe.token_spy(model) as seen:
                tiny.sample(each, *size, cfg=1.0)
            counts.append(sum(sum(tokens) for tokens in seen.values()))
        assert counts[1] <= counts[0] < counts[2]
        assert not torch.equal(tiny.sample(patched, *size), tiny.sample(free, *size))
