"""The token-merging node through ComfyUI's own sampling: every method, both hosts."""

from __future__ import annotations

import logging

import pytest
import tiny
import torch
import watch
from comfy.ldm.modules import attention
from comfyui_toma.nodes.token_merge import METHODS, TokenMergePatchModel
from comfyui_toma.toma_core.config import Matching, MergeConfig
from comfyui_toma.toma_core.groups import Blend
from comfyui_toma.toma_core.planning import build_plan, lay_out

MODELS = {"sdxl": tiny.sdxl, "flux": tiny.flux}
TEXT = 7
THRESHOLD = 0.5
"""At this cosine the random weights of tiny models merge some tokens and not others."""


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def patch(model, method="CA-ToMe", **changes):
    """The node with its own defaults but for ``changes``."""
    values = {name: options.get("default") for name, (_, options) in inputs().items()}
    values.update(model=model, method=method, threshold=THRESHOLD, max_downsample="8", **changes)
    return TokenMergePatchModel.execute(**values)[0]


def inputs():
    groups = TokenMergePatchModel.INPUT_TYPES()
    return {**groups["required"], **groups.get("optional", {})}


def test_the_defaults_are_those_of_the_paper():
    defaults = {name: options.get("default") for name, (_, options) in inputs().items()}
    assert defaults["method"] == "CA-ToMe" and defaults["threshold"] == 0.7
    assert defaults["refresh_steps"] == "0,8,11,13,20,25,30,35,45-49"
    assert defaults["max_downsample"] == "2" and defaults["ratio"] == 0.5
    assert "50" in inputs()["refresh_steps"][1]["tooltip"]
    assert not inputs()["seed"][1].get("control_after_generate")


@pytest.mark.parametrize("queries_only", [False, True])
@pytest.mark.parametrize("make", [tiny.sdxl, tiny.sd15, tiny.flux])
def test_attention_sees_the_tokens_that_the_ratio_leaves(make, queries_only):
    model = make()
    spied, seen = watch.attention_spy(model)
    tiny.sample(spied, 16, 24, cfg=1.0)
    whole = list(seen)
    for method in ("ToMe", "ToFu"):
        seen.clear()
        tiny.sample(patch(spied, method, merge_queries_only=queries_only), 16, 24, cfg=1.0)
        text = TEXT if tiny.is_flux(model) else 0
        for (queries, keys, _), (left, keys_left, masked) in zip(whole, seen, strict=True):
            merges = queries == keys
            assert left == (text + (queries - text) // 2 if merges else queries)
            assert keys_left == (left if merges and not queries_only else keys)
            assert not masked


@pytest.mark.parametrize(("max_downsample", "sides"), [("1", set()), ("2", {16}), ("4", {8, 16})])
def test_sdxl_merges_down_to_the_chosen_level_only(max_downsample, sides):
    """A latent of 32 x 32: SDXL attends at 16 x 16 and 8 x 8."""
    model = tiny.sdxl()
    patched = TokenMergePatchModel.execute(model, "ToMe", 0.5, THRESHOLD, "0", max_downsample, 0)[0]
    with watch.plans() as made:
        tiny.sample(patched, 32, 32, steps=1)
    assert {plan.plan.grids for plan in made} == {((side, side),) for side in sides}


def test_nothing_merges_at_ratio_zero_or_threshold_one(model):
    stock = tiny.sample(model, 24, 16, sampler="euler_ancestral")
    for method, change in (("ToMe", {"ratio": 0.0}), ("ToFu", {"ratio": 0.0})):
        patched = patch(model, method, **change)
        assert torch.equal(tiny.sample(patched, 24, 16, sampler="euler_ancestral"), stock)
    whole = TokenMergePatchModel.execute(model, "CA-ToMe", 0.5, 1.0, "0", "8", 0)[0]
    assert whole.model_options == model.model_options
    # So alike no two tokens are: looked for, none found, and said so.
    none = TokenMergePatchModel.execute(model, "CA-ToMe", 0.5, 0.9999, "0", "8", 0)[0]
    assert torch.equal(tiny.sample(none, 24, 16, sampler="euler_ancestral"), stock)


def test_a_run_says_what_merged_and_what_did_not(caplog):
    model = tiny.sdxl()
    caplog.set_level(logging.INFO, "toma")
    tiny.sample(patch(model, "ToMe"), 32, 32, steps=1)
    merged = "ToMe: SDXL 256x256: 64 -> 32 tokens in 12 blocks, 256 -> 128 tokens in 5 blocks"
    assert merged in caplog.text
    caplog.clear()
    tiny.sample(TokenMergePatchModel.execute(model, "CA-ToMe", 0.5, 0.9999, "0", "8", 0)[0])
    assert "Inactive on SDXL 128x128: no two tokens were alike enough." in caplog.text


def test_tofu_prunes_in_the_first_half_of_the_blocks_and_keeps_norms_in_the_second():
    for model, blocks in ((tiny.sdxl(), 17), (tiny.flux(), 5)):
        with watch.plans() as made:
            tiny.sample(patch(model, "ToFu"), 32, 32, steps=1, cfg=1.0)
        blends = {each.block: each.plan.blend for each in made}
        assert sorted(blends) == list(range(blocks))
        assert [blends[block] for block in range(blocks)] == [
            Blend.PRUNE if 2 * block < blocks else Blend.NORM for block in range(blocks)
        ]


@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral", "heun", "dpmpp_2m", "lcm"])
def test_matchings_follow_sigmas_and_not_calls(sampler):
    """CA-ToMe matches at 8 of 12 steps of the list's scale, ToMe and ToFu at all of them."""
    model = tiny.flux()
    listed = {0, 1, 2, 3, 4, 6, 7, 8, 10, 11}
    for method in METHODS:
        with watch.plans() as made:
            tiny.sample(patch(model, method), 16, 16, steps=12, cfg=1.0, sampler=sampler)
        each = [sum(1 for plan in made if plan.block == block) for block in range(5)]
        assert each == [len(listed) if method == "CA-ToMe" else 12] * 5


def test_ca_tome_matches_seldom_and_merges_more_as_tokens_become_alike():
    """Its two claims. The sampler is led to a picture that has plain parts."""
    model = tiny.flux()
    picture = torch.zeros(1, 16, 16, 16)
    picture[:, :, :8] = 1.5
    picture[:, :8, :, :6] = -1.0

    def lead(apply_model, call):
        apply_model(call["input"], call["timestep"], **call["c"])
        return picture

    model.set_model_unet_function_wrapper(lead)
    counts = {}

    def after_step(step, *_):
        if made:
            likeness = sum(each.likeness for each in made)
            counts[step] = (likeness, sum(sum(each.merged_away) for each in made))
            made.clear()

    with watch.plans() as made:
        tiny.sample(patch(model), noise=tiny.noise_for(model, 16, 16), steps=50,
                    callback=after_step)  # fmt: skip
    assert list(counts) == [0, 8, 11, 13, 20, 25, 30, 35, 45, 46, 47, 48, 49]
    ranks = torch.tensor(list(counts.values())).argsort(0).argsort(0).float()
    steps = torch.arange(len(counts)).float()
    assert torch.corrcoef(torch.stack((steps, ranks[:, 0], ranks[:, 1]))).min() > 0.8
    assert counts[49][1] > 3 * counts[0][1]


def test_conditions_match_each_for_itself():
    model = tiny.sdxl()
    with watch.plans() as made:
        tiny.sample(patch(model, "CA-ToMe"), 24, 24, steps=5)
    # Each of 17 blocks, for the positive and the negative prompt.
    assert len(made) == 5 * 17 * 2


@pytest.mark.parametrize(
    ("height", "width"), [(1, 9), (13, 2), (35, 26), (26, 35), (45, 16), (67, 13)]
)
def test_odd_sizes_match_on_the_true_grid(model, method, height, width):
    """K1: the grid of every level is the true one, whatever the size."""
    spied, seen = watch.attention_spy(model)
    with watch.plans() as made:
        image = tiny.sample(patch(spied, method), height, width, steps=1, cfg=1.0)
    assert torch.isfinite(image).all()
    sizes, levels = set(), {(height, width)}
    while True:
        rows, columns = min(levels)
        half = (-(-rows // 2), -(-columns // 2))
        if half in levels:
            break
        levels.add(half)
    for each in made:
        sizes.add(each.plan.grids[0])
        assert len(each.plan.grids) == 1
    assert sizes <= levels and (sizes or max(height, width) < 3)


def interrupted(model, noise):
    def stop(step, *_):
        if step == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        tiny.sample(model, noise=noise, steps=4, callback=stop)


def test_a_reused_model_equals_a_fresh_one(model, method):
    """K2: sizes, batches and an abort leave nothing behind."""
    patched = patch(model, method)
    noises = [tiny.noise_for(model, 16, 16), tiny.noise_for(model, 24, 12, 2)]
    fresh = [tiny.sample(patch(model, method), noise=noise, steps=4) for noise in noises]
    for number in (0, 1, None, 0):
        if number is None:
            interrupted(patched, noises[0])
        else:
            again = tiny.sample(patched, noise=noises[number], steps=4)
            assert torch.equal(again, fresh[number])


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


@pytest.mark.parametrize("backend", ["basic", "sub_quad", "split", "pytorch"])
def test_every_attention_of_comfyui_hides_padding(backend):
    """Whatever stands in a padded place, and however unlike the counts, nothing changes."""
    function = getattr(attention, f"attention_{backend}")
    config = MergeConfig(scope="attention", matching=Matching("CA-ToMe", threshold=0.8))
    x = torch.tensor([9.0, 0.0])[:, None, None] + torch.randn(2, 64, 8)
    plan = build_plan(x, lay_out(((8, 8),), config), config)
    assert plan.padding[0].sum() > 40 and not plan.padding[1].any()
    merged = plan.merge(x)
    filled = merged.masked_fill(plan.padding[..., None], 50.0)
    mask = plan.hide_padding(None, x.dtype)
    outcomes = [plan.unmerge(function(each, each, each, 2, mask)) for each in (merged, filled)]
    torch.testing.assert_close(*outcomes, atol=0, rtol=0)
    kept = merged[:1, ~plan.padding[0]]
    alone = function(kept, kept, kept, 2)
    torch.testing.assert_close(outcomes[0][:1], alone[:, plan.groups()[0]])


def test_a_wrong_list_stops_only_the_method_that_reads_it():
    model = tiny.flux()
    with pytest.raises(ValueError, match='refresh_steps must be steps from 0 to 49 such as "0,8'):
        patch(model, "CA-ToMe", refresh_steps="soon")
    patch(model, "ToMe", refresh_steps="soon")
