"""The token-merging node through ComfyUI's own sampling: every method, both hosts."""

from __future__ import annotations

import logging

import pytest
import tiny
import torch
import watch
from comfy.ldm.modules import attention
from comfyui_toma.toma_core.config import Matching, MergeConfig
from comfyui_toma.toma_core.groups import Blend
from comfyui_toma.toma_core.planning import build_plan, lay_out
from merging import inputs, patch

MODELS = {"sdxl": tiny.sdxl, "flux": tiny.flux}
TEXT = 7


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


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
    patched = patch(model, "ToMe", max_downsample=max_downsample)
    with watch.plans() as made:
        tiny.sample(patched, 32, 32, steps=1)
    assert {plan.plan.grids for plan in made} == {((side, side),) for side in sides}


def test_nothing_merges_at_ratio_zero_or_threshold_one(model):
    stock = tiny.sample(model, 24, 16, sampler="euler_ancestral")
    for method, change in (("ToMe", {"ratio": 0.0}), ("ToFu", {"ratio": 0.0})):
        patched = patch(model, method, **change)
        assert torch.equal(tiny.sample(patched, 24, 16, sampler="euler_ancestral"), stock)
    whole = patch(model, threshold=1.0)
    assert whole.model_options == model.model_options
    # So alike no two tokens are: looked for, none found, and said so.
    none = patch(model, threshold=0.9999)
    assert torch.equal(tiny.sample(none, 24, 16, sampler="euler_ancestral"), stock)


def test_a_run_says_what_merged_and_what_did_not(caplog):
    model = tiny.sdxl()
    caplog.set_level(logging.INFO, "toma")
    tiny.sample(patch(model, "ToMe"), 32, 32, steps=1)
    merged = "ToMe: SDXL 256x256: 64 -> 32 tokens in 12 blocks, 256 -> 128 tokens in 5 blocks"
    assert merged in caplog.text
    caplog.clear()
    tiny.sample(patch(model, threshold=0.9999))
    assert "Inactive on SDXL 128x128: no two tokens were alike enough." in caplog.text
    caplog.clear()
    tiny.sample(patch(model), steps=1)
    assert "merge from the second step on, and this run has one" in caplog.text


def test_ca_tome_merges_from_the_second_step_on(model, caplog):
    """What the first step finds alike is counted when it is over."""
    caplog.set_level(logging.INFO, "toma")
    spied, seen = watch.attention_spy(model)
    steps = []
    callback = {"callback": lambda *_: steps.append(list(seen)) or seen.clear()}
    tiny.sample(patch(spied), 16, 24, steps=4, cfg=1.0, **callback)
    seen.clear()
    tiny.sample(spied, 16, 24, steps=1, cfg=1.0)
    assert steps[0] == seen
    whole = sum(queries for queries, _, _ in seen)
    assert all(sum(queries for queries, _, _ in step) < whole for step in steps[1:])
    assert "Inactive" not in caplog.text


def test_tofu_prunes_in_the_first_half_of_the_blocks_and_keeps_norms_in_the_second():
    for model, blocks in ((tiny.sdxl(), 17), (tiny.flux(), 5)):
        with watch.plans() as made:
            tiny.sample(patch(model, "ToFu"), 32, 32, steps=1, cfg=1.0)
        blends = {each.block: each.plan.blend for each in made}
        assert sorted(blends) == list(range(blocks))
        assert [blends[block] for block in range(blocks)] == [
            Blend.PRUNE if 2 * block < blocks else Blend.NORM for block in range(blocks)
        ]


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
