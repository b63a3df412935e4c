"""Kind K1 of public reports: the token grid is the real one, at every size and level."""

from __future__ import annotations

import itertools

import places
import pytest
import small
import tiny
import torch
from comfy.ldm.modules.attention import (
    attention_basic,
    attention_pytorch,
    attention_split,
    attention_sub_quad,
    optimized_attention,
)
from comfy_extras.nodes_model_downscale import PatchModelAddDownscale
from comfy_extras.nodes_sag import SelfAttentionGuidance
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.toma import ToMAPatchFlux, ToMAPatchModel, ToMAPatchSDXL
from comfyui_toma.nodes.unet import UNetBlock
from comfyui_toma.toma_core.config import MergeConfig, Region, Scope
from comfyui_toma.toma_core.regions import build_layout
from matrix import matrix

SIDES = [1, 2, 9, 13, 16, 35, 45, 64, 65, 67, 112, 128, 135, 168, 193, 240]
SHRINKS = [None, 1.25, 1.5, 2.0]
RATIOS = [0.3, 0.75, 0.9]
GLOBAL_TOKENS = 1100
"""Choosing destinations over a whole grid takes minutes beyond this; its one region is the grid,
so a larger grid adds nothing."""


@pytest.fixture(scope="module")
def unet():
    return places.PlacedUNet()


@pytest.fixture(scope="module")
def flux():
    return places.PlacedFlux()


def deep_shrink(factor, block_number=1):
    """The core node, over the whole sampling range."""

    def apply(model):
        if factor is None:
            return model
        return PatchModelAddDownscale.execute(
            model, block_number, factor, 0.0, 1.0, True, "area", "area"
        )[0]

    return apply


def level_grid(size, level, shrink=None):
    """Rows and columns at a level: every halving rounds up; deep shrink cuts below level 0."""
    rows, columns = size
    if level and shrink:
        rows, columns = round(rows / shrink), round(columns / shrink)
    for _ in range(level):
        rows, columns = -(-rows // 2), -(-columns // 2)
    return rows, columns


def in_every_scope(cases):
    """Every case with every ratio and every scope; each pair of those meets in a third of them."""
    scopes = list(Scope)
    for number, case in enumerate(cases):
        for turn, ratio in enumerate(RATIOS):
            yield *case, ratio, scopes[(number + turn) % 3]


def unet_cases():
    """Every size with every shrink that leaves a pixel, and every region."""
    for *size, shrink, region in itertools.product(SIDES, SIDES, SHRINKS, Region):
        if shrink and min(round(side / shrink) for side in size) < 1:
            continue
        if region is Region.GLOBAL and size[0] * size[1] > GLOBAL_TOKENS:
            continue
        yield tuple(size), shrink, region


def flux_cases():
    for *size, region in itertools.product(SIDES, SIDES, Region):
        if region is Region.GLOBAL and size[0] * size[1] > 4 * GLOBAL_TOKENS:
            continue
        yield tuple(size), region


def assert_unet_in_place(unet, size, shrink, config):
    seen = places.call(unet, config, size, deep_shrink(shrink))
    where = (size, shrink, config)
    assert seen.problems == [], where
    expected = {0: 2, 1: 2, 2: 3}
    found = [grid for (grid,) in seen.grids.values()]
    for level, times in expected.items():
        grid = level_grid(size, level, shrink)
        assert found.count(grid) >= times, (where, found)
    for name, grids in seen.grids.items():
        layout = build_layout(grids, config)
        assert (name in seen.merged) == (not layout.is_identity), (where, name)


def assert_flux_in_place(flux, size, config, references=()):
    seen = places.call(flux, config, size, references=references)
    assert seen.problems == [], (size, config)
    layout = build_layout(seen.grids["sequence"], config)
    assert seen.merged == (set() if layout.is_identity else {"double", "single"}), (size, config)


UNET_REPORTS = [
    # report, latent rows and columns, shrink, ratio
    (1, (135, 240), None, 0.3),
    (1, (240, 135), None, 0.3),
    (2, (240, 240), None, 0.5),
    (2, (135, 240), 2.0, 0.5),
    (2, (240, 135), 2.0, 0.5),
    (4, (148, 220), None, 0.5),
    (5, (115, 76), None, 0.5),
    (5, (76, 115), None, 0.5),
    (7, (96, 128), None, 0.5),
    (7, (128, 96), None, 0.5),
    (11, (52, 84), None, 0.5),
    (11, (84, 52), None, 0.5),
    (12, (60, 102), 2.0, 0.5),
    (13, (64, 64), 1.5, 0.5),
    (13, (73, 128), 1.5, 0.5),
]
FLUX_REPORTS = [(9, (168, 135)), (9, (135, 168)), (10, (193, 193))]


def test_tokens_of_a_unet_merge_inside_their_true_rectangle(unet):
    for size, shrink, region, ratio, scope in matrix(in_every_scope(unet_cases()), every=200):
        config = MergeConfig(ratio=ratio, region=region, scope=scope)
        assert_unet_in_place(unet, size, shrink, config)


def test_tokens_of_flux_merge_inside_their_true_rectangle(flux):
    for size, region, ratio, scope in matrix(in_every_scope(flux_cases()), every=60):
        config = MergeConfig(ratio=ratio, region=region, scope=scope)
        assert_flux_in_place(flux, size, config)


@pytest.mark.parametrize(("report", "size", "shrink", "ratio"), UNET_REPORTS)
def test_unet_sizes_of_public_reports(unet, report, size, shrink, ratio):
    for scope in matrix(Scope, every=3) if max(size) > 130 else Scope:
        assert_unet_in_place(unet, size, shrink, MergeConfig(ratio=ratio, scope=scope))


@pytest.mark.parametrize(("report", "size"), FLUX_REPORTS)
@pytest.mark.parametrize("scope", Scope)
def test_flux_sizes_of_public_reports(flux, report, size, scope):
    assert_flux_in_place(flux, size, MergeConfig(scope=scope))


@pytest.mark.parametrize("tile_size", [1, 3, 8, 64])
@pytest.mark.parametrize("size", [(13, 35), (35, 13), (2, 65), (65, 2), (9, 16), (16, 9)])
def test_thin_grids_in_both_orientations_and_tiles_of_any_size(unet, flux, size, tile_size):
    config = MergeConfig(tile_size=tile_size)
    assert_unet_in_place(unet, size, None, config)
    assert_flux_in_place(flux, size, config)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("region", Region)
def test_reference_pictures_of_other_shapes_keep_to_themselves(flux, region, scope):
    """Flux Kontext appends one grid per reference picture (report 59's trap)."""
    config = MergeConfig(region=region, scope=scope)
    assert_flux_in_place(flux, (33, 20), config, references=((13, 40), (20, 20)))


def test_the_grids_that_the_reports_name_are_those_of_the_model(unet):
    """Report 11: 84 x 52 has a 21 x 13 level; report 12: 1530 tokens shrink to 390."""
    config = MergeConfig()
    grids = places.call(unet, config, (52, 84)).grids
    assert ((13, 21),) in grids.values() and ((26, 42),) in grids.values()
    whole = places.call(unet, config, (60, 102)).grids
    shrunk = places.call(unet, config, (60, 102), deep_shrink(2.0)).grids
    assert ((30, 51),) in whole.values()
    assert ((15, 26),) in shrunk.values() and ((30, 51),) not in shrunk.values()


def test_a_wrong_grid_would_be_noticed(unet, monkeypatch):
    """The check itself: rows and columns swapped, as in the reports, must not pass."""
    stock = UNetBlock._plan_for

    def transposed(self, x, args, kwargs):
        options = dict(kwargs["transformer_options"])
        batch, channels, rows, columns = options["activations_shape"]
        options["activations_shape"] = [batch, channels, columns, rows]
        return stock(self, x, args, {"transformer_options": options})

    monkeypatch.setattr(UNetBlock, "_plan_for", transposed)
    seen = places.call(unet, MergeConfig(), (32, 48))
    assert any("another region" in problem for problem in seen.problems)


NODES = {
    ToMAPatchModel: (small.sdxl, small.sd15, small.flux),
    ToMAPatchSDXL: (small.sdxl, small.sd15),
    ToMAPatchFlux: (small.flux,),
}


@pytest.mark.parametrize(
    ("node", "make"), [(node, make) for node, makes in NODES.items() for make in makes]
)
def test_ratio_0_is_stock_at_every_kind_of_size(node, make):
    model = make()
    unpatched = node.execute(model, ratio=0.0)[0]
    for size in [(9, 13), (35, 16), (2, 45)]:
        stock = tiny.sample(model, *size, steps=1)
        assert torch.equal(tiny.sample(unpatched, *size, steps=1), stock), size


@pytest.mark.parametrize(("shrink", "scope"), list(zip(SHRINKS[1:], Scope, strict=True)))
def test_deep_shrink_comes_and_goes_within_a_run(shrink, scope):
    """Kohya's node shrinks the first steps only: grids change in the middle of a run."""
    model = small.sdxl()

    def shrunk(model):
        return PatchModelAddDownscale.execute(
            model, 3, shrink, 0.0, 0.5, True, "bicubic", "bicubic"
        )[0]

    def sampled(model):
        return tiny.sample(model, 18, 13, steps=3)

    config = MergeConfig(scope=scope, reuse_interval=100)
    before, after = sampled(shrunk(attach(model, config))), sampled(attach(shrunk(model), config))
    assert torch.isfinite(before).all()
    assert torch.equal(before, after)
    stock = sampled(shrunk(model))
    assert not torch.equal(before, stock)
    assert torch.equal(sampled(attach(shrunk(model), MergeConfig(ratio=0.0))), stock)


@pytest.mark.parametrize("size", [(64, 64), (73, 128)])
def test_self_attention_guidance_with_deep_shrink_runs_where_it_runs_without_us(size):
    """Report 13: SAG reads the map of the middle block, whose grid deep shrink changes."""
    model = small.sdxl()

    def neighbours(model):
        return deep_shrink(1.5, block_number=3)(SelfAttentionGuidance.execute(model, 0.5, 2.0)[0])

    stock = outcome(neighbours(model), size)
    ours = outcome(neighbours(attach(model, MergeConfig())), size)
    assert type(ours) is type(stock)
    if isinstance(stock, torch.Tensor):
        assert torch.isfinite(ours).all() and not torch.equal(ours, stock)
    else:
        assert str(ours) == str(stock)


def outcome(model, size):
    """The picture, or what went wrong."""
    try:
        return tiny.sample(model, *size, steps=1)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("shrink", [None, 2.0])
def test_a_cross_attention_mask_meets_all_tokens_in_order(shrink, scope):
    """Reports 11 and 12: an IPAdapter-like replacement weighs tokens by a mask of the grid."""
    model = small.sdxl()
    met = []

    def masked_cross_attention(q, k, v, options):
        """Attention to the text, weighed by a mask that was resized to the true grid."""
        rows, columns = options["activations_shape"][-2:]
        met.append((q.shape[1], rows * columns))
        mask = torch.linspace(0, 1, rows * columns)[None, :, None]
        return optimized_attention(q, k, v, options["n_heads"]) * mask

    neighbour = deep_shrink(shrink, block_number=3)(model.clone())
    for stage, number in itertools.product(("input", "output"), range(6)):
        neighbour.set_model_attn2_replace(masked_cross_attention, stage, number)
    merged = tiny.sample(attach(neighbour, MergeConfig(scope=scope)), 52, 84, steps=1, cfg=1.0)
    assert torch.isfinite(merged).all()
    assert met and all(tokens == places_in_grid for tokens, places_in_grid in met)
    assert not torch.equal(merged, tiny.sample(neighbour, 52, 84, steps=1, cfg=1.0))


@pytest.mark.parametrize("make", [small.sdxl, small.flux])
@pytest.mark.parametrize("scope", Scope)
def test_every_attention_backend_gets_queries_keys_and_values_that_fit(make, scope):
    """Report 15: a query that was cut down while key and value were not.

    The plans of the first step, made under one backend, serve the second step under another: a
    choice among nearly equal tokens may turn on the last bit, and is not what is compared here.
    """
    model = make()

    def sampled(backend, config):
        first = []

        def use(_, *args, **kwargs):
            sigma = float(kwargs["transformer_options"]["sigmas"][0])
            first.append(sigma)
            return (attention_pytorch if sigma == first[0] else backend)(*args, **kwargs)

        chosen = attach(model, config)
        chosen.model_options["transformer_options"]["optimized_attention_override"] = use
        return tiny.sample(chosen, 18, 14)

    none = MergeConfig(ratio=0.0)
    config = MergeConfig(scope=scope, reuse_interval=100, weight_interval=100)
    stock, merged = (sampled(attention_pytorch, each) for each in (none, config))
    assert not torch.equal(stock, merged)
    for backend in (attention_split, attention_sub_quad, attention_basic):
        own = (sampled(backend, none) - stock).abs().max()
        assert (
            sampled(backend, config) - merged
        ).abs().max() <= 10 * own + 1e-5 * merged.abs().max()
