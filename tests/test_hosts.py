"""Both hosts through ComfyUI's own sampling: which modules see how many tokens, and when."""

from __future__ import annotations

import probe
import pytest
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.flux import FluxBlocks
from comfyui_toma.nodes.unet import UNetBlocks
from comfyui_toma.toma_core.config import MergeConfig, Region, Scope

MODELS = {"sdxl": tiny.sdxl, "sd15": tiny.sd15, "flux": tiny.flux}
SCOPES = list(Scope)
TEXT = 7


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def tokens_seen(model, patched, height=32, width=48, **options):
    """Token counts by block part, of every call; stock and patched."""
    runs = []
    for each in (model, patched):
        with probe.token_spy(model) as seen:
            tiny.sample(each, height, width, cfg=1.0, **options)
        runs.append(dict(seen))
    return runs


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("scope", SCOPES)
def test_every_module_of_the_scope_sees_the_tokens_that_the_ratio_leaves(model, scope, ratio):
    """4x4 tiles divide these grids evenly, so the counts are exact."""
    config = MergeConfig(ratio=ratio, tile_size=4, scope=scope)
    stock, merged = tokens_seen(model, attach(model, config))
    assert stock and stock.keys() == merged.keys()
    for part, counts in stock.items():
        text = TEXT if "single" in part else 0
        for before, after in zip(counts, merged[part], strict=True):
            in_scope = scope is not Scope.ATTENTION or part.endswith("attn1")
            expected = text + round((before - text) * (1 - ratio)) if in_scope else before
            assert after == expected, (part, before, after)


@pytest.mark.parametrize("region", list(Region))
@pytest.mark.parametrize("scope", SCOPES)
def test_odd_sizes_and_every_region_sample_and_stay_finite(model, scope, region):
    config = MergeConfig(region=region, scope=scope)
    merged = tiny.sample(attach(model, config), 35, 26)
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, tiny.sample(model, 35, 26))


def test_ratio_zero_is_bit_equal_to_stock_and_patches_nothing(model):
    patched = attach(model, MergeConfig(ratio=0))
    assert patched is not model
    assert patched.model_options == model.model_options and patched.wrappers == model.wrappers
    assert torch.equal(tiny.sample(patched, 24, 16), tiny.sample(model, 24, 16))


def test_a_grid_too_small_to_merge_is_bit_equal_to_stock(model):
    patched = attach(model, MergeConfig(tile_size=1))
    assert torch.equal(tiny.sample(patched, 24, 16), tiny.sample(model, 24, 16))


def test_the_range_of_steps_is_respected(model):
    """Of ten steps, only those between 30 and 60 percent of the sampling range merge."""
    config = MergeConfig(start_percent=0.3, end_percent=0.6)
    stock, merged = tokens_seen(model, attach(model, config), steps=10, scheduler="sgm_uniform")
    part = next(iter(stock))
    active = [after < before for before, after in zip(stock[part], merged[part], strict=True)]
    assert active == sorted(active[:4]) + sorted(active[4:], reverse=True)
    assert 2 <= sum(active) <= 4 and not active[0] and not active[-1]


def test_unet_levels_and_stages_are_respected():
    model = tiny.sdxl()
    for blocks, merging in [
        (UNetBlocks(max_downsample=2), {"input_blocks.4.", "output_blocks.5."}),
        (UNetBlocks(input_blocks=False, output_blocks=False), {"middle_block."}),
        (UNetBlocks(middle_block=False, input_blocks=False), {"output_blocks."}),
    ]:
        stock, merged = tokens_seen(model, attach(model, MergeConfig(), blocks))
        changed = {part for part in stock if stock[part] != merged[part]}
        assert changed
        if blocks.max_downsample == 2:
            # SDXL attends at half the latent's size in input blocks 4, 5 and output blocks 3 to 5.
            places = {".".join(part.split(".")[:2]) for part in changed}
            assert places == {f"input_blocks.{i}" for i in (4, 5)} | {
                f"output_blocks.{i}" for i in (3, 4, 5)
            }
        else:
            assert all(part.startswith(tuple(merging)) for part in changed)


def test_flux_blocks_left_alone_stay_whole():
    model = tiny.flux()
    blocks = FluxBlocks(skip_first_double=1, skip_first_single=1, skip_last_single=1)
    stock, merged = tokens_seen(model, attach(model, MergeConfig(), blocks))
    changed = {".".join(part.split(".")[:2]) for part in stock if stock[part] != merged[part]}
    assert changed == {"double_blocks.1", "single_blocks.1"}


def test_skipping_every_block_leaves_flux_stock():
    model = tiny.flux()
    patched = attach(model, MergeConfig(), FluxBlocks(19, 0, 0, 38))
    assert torch.equal(tiny.sample(patched), tiny.sample(model))


def kontext(model, **extra):
    """Conditioning with two reference pictures of other sizes."""
    generator = torch.Generator().manual_seed(9)
    references = [torch.randn(1, 16, *size, generator=generator) for size in ((24, 32), (13, 20))]
    return tiny.conditioning(model, reference_latents=references, **extra)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", ["offset", "index", "uxo"])
def test_reference_pictures_merge_as_grids_of_their_own(scope, method):
    model = tiny.flux()
    positive = kontext(model, reference_latents_method=method)
    config = MergeConfig(tile_size=4, scope=scope)
    patched = attach(model, config)
    stock, merged = tokens_seen(model, patched, 32, 32, positive=positive)
    tokens = 16 * 16 + 12 * 16 + 7 * 10
    assert stock["double_blocks.0.ff"][0] == tokens
    if scope is not Scope.ATTENTION:
        # 4x4 tiles of the third grid are 4x3, 4x4, 3x3 and 3x4 tokens (and 12 - 6 = 6 and so on).
        assert abs(merged["double_blocks.0.ff"][0] - tokens / 2) <= 6
    image = tiny.sample(patched, 32, 32, positive=positive)
    assert torch.isfinite(image).all()
    assert not torch.equal(image, tiny.sample(model, 32, 32, positive=positive))


@pytest.mark.parametrize("scope", SCOPES)
def test_an_attention_mask_follows_the_tokens(scope):
    """A mask that lets everything attend changes nothing; one that hides the text does."""
    model = tiny.flux()
    patched = attach(model, MergeConfig(scope=scope))
    tokens = TEXT + 16 * 16
    everything = torch.zeros(1, tokens, tokens)
    no_text = everything.clone()
    no_text[:, TEXT:, :TEXT] = -1e4
    shape = {"attention_mask_img_shape": (16, 16)}

    def image(mask):
        extra = {} if mask is None else {"attention_mask": mask, **shape}
        return tiny.sample(patched, 32, 32, positive=tiny.conditioning(model, **extra))

    plain = image(None)
    torch.testing.assert_close(image(everything), plain, atol=1e-4, rtol=1e-4)
    assert (image(no_text) - plain).abs().max() > 1e-2


def test_modulation_ranges_become_those_of_merged_tokens():
    from comfyui_toma.nodes.followers import merged_ranges
    from comfyui_toma.toma_core.planning import build_plan
    from comfyui_toma.toma_core.regions import build_layout

    config = MergeConfig(tile_size=4)
    layout = build_layout(((8, 8), (4, 4)), config)
    plan = build_plan(torch.randn(1, 80, 4), layout, config)
    assert merged_ranges(plan, [(0, 64, 0), (64, 80, 1)], 0) == [(0, 32, 0), (32, 40, 1)]
    assert merged_ranges(plan, [(0, 71, 0), (71, 87, 1)], 7) == [(0, 39, 0), (39, 47, 1)]
    assert merged_ranges(plan, [(0, 63, 0), (63, 80, 1)], 0) is None
