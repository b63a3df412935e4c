"""Public bug reports over the token-merging node, beyond those that ``test_k*.py`` run over every
way of merging."""

from __future__ import annotations

import pytest
import tiny
import torch
import watch
from comfyui_toma.nodes.token_merge import METHODS
from merging import patch

MODELS = {"sdxl": tiny.sdxl, "flux": tiny.flux}
TEXT = 7


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral", "heun", "dpmpp_2m", "lcm"])
def test_matchings_follow_sigmas_and_not_calls(sampler):
    """K10: of 12 steps CA-ToMe's list, scaled, names 10; ToMe and ToFu match at all of them."""
    model = tiny.flux()
    for method in METHODS:
        with watch.plans() as made:
            tiny.sample(patch(model, method), 16, 16, steps=12, cfg=1.0, sampler=sampler)
        each = [sum(1 for plan in made if plan.block == block) for block in range(5)]
        assert each == [10 if method == "CA-ToMe" else 12] * 5


@pytest.mark.parametrize(
    ("height", "width"), [(1, 9), (13, 2), (35, 26), (26, 35), (45, 16), (67, 13)]
)
def test_odd_sizes_match_on_the_true_grid(model, method, height, width):
    """K1: the grid of every level is the true one, whatever the size."""
    with watch.plans() as made:
        image = tiny.sample(patch(model, method), height, width, steps=1, cfg=1.0)
    assert torch.isfinite(image).all()
    levels = [(height, width)]
    for _ in range(3):
        levels.append(tuple(-(-side // 2) for side in levels[-1]))
    assert {each.plan.grids for each in made} <= {(level,) for level in levels}
    assert made


def test_an_image_of_a_batch_equals_it_alone(model, method):
    """K4: also where samples merge different numbers of tokens; as near as stock's own batches."""
    noise = torch.cat((tiny.noise_for(model, 24, 16), 0.2 * tiny.noise_for(model, 24, 16, 2, 8)))

    def spread(model):
        both = tiny.sample(model, noise=noise, steps=3)
        alone = [tiny.sample(model, noise=noise[i : i + 1], steps=3) for i in range(3)]
        return (both - torch.cat(alone)).abs().max(), both

    stock, image = spread(model)
    with watch.plans() as made:
        ours, merged = spread(patch(model, method))
    assert ours <= 4 * stock + 1e-5 * image.abs().max()
    assert not torch.equal(merged, image)
    if method == "CA-ToMe":
        assert any(len(set(each.merged_away)) > 1 for each in made)


def test_grouping_of_conditions_never_changes_an_image(model, method, monkeypatch):
    """K4: joint, split, joint across steps equals all split.

    ComfyUI joins conditions where the memory that they are said to need is free.
    """
    prompts = {
        "positive": tiny.conditioning(model, 1, 77),
        "negative": tiny.conditioning(model, 2, 77),
    }

    def image(model, memory):
        needs = iter(memory)
        monkeypatch.setattr(model.model, "memory_required", lambda *_, **__: next(needs))
        return tiny.sample(model, 24, 16, steps=4, cfg=3.0, **prompts)

    # Asked once for every attempt to join; a pattern of five falls differently on every step.
    joined, apart = 0.0, 1e18

    def spread(model):
        split = image(model, [apart] * 100)
        mixed = image(model, [joined, apart, apart, joined, joined] * 20)
        return (mixed - split).abs().max(), split.abs().max()

    stock, _ = spread(model)
    ours, scale = spread(patch(model, method))
    assert ours <= 4 * stock + 1e-5 * scale


def test_the_same_seed_paints_the_same_picture_and_another_seed_another(model, method):
    """K9: the global generators are neither used nor moved."""
    patched = patch(model, method)
    first = tiny.sample(patched, 16, 24, sampler="euler_ancestral", steps=3)
    state = torch.get_rng_state()
    tiny.sample(patch(model, method, seed=9), 16, 24, steps=2)
    moved = torch.get_rng_state()
    torch.set_rng_state(state)
    tiny.sample(model, 16, 24, steps=2)
    assert torch.equal(moved, torch.get_rng_state())
    torch.manual_seed(77)
    assert torch.equal(tiny.sample(patched, 16, 24, sampler="euler_ancestral", steps=3), first)
    other = tiny.sample(patch(model, method, seed=9), 16, 24, sampler="euler_ancestral", steps=3)
    assert not torch.equal(other, first)


@pytest.mark.parametrize("queries_only", [False, True])
def test_reference_pictures_and_masks_work_with_padding(method, queries_only):
    """Kontext: several grids in one sequence, a mask besides, and samples that differ."""
    model = tiny.flux()
    patched = patch(model, method, merge_queries_only=queries_only)
    references = [torch.randn(1, 16, 13, 20, generator=torch.Generator().manual_seed(9))]
    tokens = TEXT + 8 * 8 + 7 * 10
    noise = torch.cat((tiny.noise_for(model, 16, 16), 0.2 * tiny.noise_for(model, 16, 16, 1, 8)))

    def image(mask):
        extra = {} if mask is None else {"attention_mask": mask, "attention_mask_img_shape": (8, 8)}
        positive = tiny.conditioning(model, reference_latents=references, **extra)
        return tiny.sample(patched, noise=noise, positive=positive)

    with watch.plans() as made:
        plain = image(None)
    assert {each.plan.grids for each in made} == {((8, 8), (7, 10))}
    everything = torch.zeros(1, tokens, tokens)
    torch.testing.assert_close(image(everything), plain, atol=1e-4, rtol=1e-4)
    everything[:, TEXT:, :TEXT] = -1e4
    assert (image(everything) - plain).abs().max() > 1e-3
