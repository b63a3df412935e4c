"""Kept detail: whole steps are stock, and between them only what changed is guessed."""

from __future__ import annotations

import itertools

import comfy.sample
import comfy.samplers
import probe
import pytest
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.toma_core.config import Matching, MergeConfig, Region, Scope
from comfyui_toma.toma_core.detail import Carry, pack, unpack
from comfyui_toma.toma_core.planning import build_plan, lay_out
from matrix import matrix

MODELS = {"sdxl": tiny.sdxl, "sd15": tiny.sd15, "flux": tiny.flux}
SCOPES = list(Scope)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def keeping(**settings):
    return MergeConfig(keep_detail=True, **settings)


def predictions(model, height=32, width=48, calls=3, steps=2, **conditioning):
    """What the model says ``calls`` times in a row of one latent, at the first step."""
    said = []

    @torch.no_grad()
    def ask(denoiser, x, sigmas, extra_args, **_):
        sigma = sigmas[:1].expand(x.shape[0])
        said.extend(denoiser(x, sigma, **extra_args) for _ in range(calls))
        return x

    sampler = comfy.samplers.KSAMPLER(ask)
    noise = tiny.noise_for(model, height, width)
    sigmas = comfy.samplers.calculate_sigmas(
        model.get_model_object("model_sampling"), "simple", steps
    )
    positive = tiny.conditioning(model, **conditioning)
    negative = tiny.conditioning(model, seed=5)
    latent = torch.zeros_like(noise)
    comfy.sample.sample_custom(model, noise, 4.0, sampler, sigmas, positive, negative, latent)
    return said


@pytest.mark.parametrize(
    ("scope", "region", "size"),
    matrix(itertools.product(SCOPES, Region, [(32, 48), (35, 26)]), every=4),
)
def test_where_nothing_changed_since_the_whole_step_nothing_is_lost(model, scope, region, size):
    """The first call runs whole and is stock to the bit; later ones merge, to the same result."""
    patched = attach(model, keeping(scope=scope, region=region, tile_size=4))
    stock = predictions(model, *size, calls=1)[0]
    first, *others = predictions(patched, *size)
    assert torch.equal(first, stock)
    for other in others:
        torch.testing.assert_close(other, stock, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("scope", SCOPES)
def test_an_attention_mask_follows_the_kept_keys(scope):
    model = tiny.flux()
    mask = torch.randn(1, 7 + 16 * 24, 7 + 16 * 24, generator=torch.Generator().manual_seed(2))
    extra = {"attention_mask": 4 * mask, "attention_mask_img_shape": (16, 24)}
    stock = predictions(model, calls=1, **extra)[0]
    assert not torch.allclose(stock, predictions(model, calls=1)[0], atol=1e-2)
    first, second, _ = predictions(attach(model, keeping(scope=scope)), **extra)
    assert torch.equal(first, stock)
    torch.testing.assert_close(second, stock, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("scope", SCOPES)
def test_reference_pictures_keep_their_detail(scope):
    model = tiny.flux()
    generator = torch.Generator().manual_seed(9)
    references = [torch.randn(1, 16, *size, generator=generator) for size in ((24, 32), (13, 20))]
    stock = predictions(model, calls=1, reference_latents=references)[0]
    patched = attach(model, keeping(scope=scope, tile_size=4))
    first, second, _ = predictions(patched, reference_latents=references)
    assert torch.equal(first, stock)
    torch.testing.assert_close(second, stock, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("scope", SCOPES)
def test_steps_run_whole_where_destinations_are_chosen_and_merged_between(model, scope):
    config = keeping(scope=scope, ratio=0.5, tile_size=4, reuse_interval=3)
    counts = []
    for each in (model, attach(model, config)):
        with probe.token_spy(model) as seen:
            tiny.sample(each, 16, 24, cfg=1.0, steps=7, sampler="euler")
        counts.append(dict(seen))
    for part, whole in counts[0].items():
        if scope is Scope.ATTENTION and not part.endswith("attn1"):
            continue
        is_whole = [before == after for before, after in zip(whole, counts[1][part], strict=True)]
        assert is_whole == [True, False, False, True, False, False, True]


def test_it_stays_nearer_to_stock_than_merging_alone(model):
    """Where steps are near to one another, as in a run of many."""
    stock = tiny.sample(model, 16, 24, steps=20)

    def error(config):
        return (tiny.sample(attach(model, config), 16, 24, steps=20) - stock).norm()

    settings = {"ratio": 0.5, "tile_size": 4, "reuse_interval": 3}
    assert error(keeping(**settings)) < 0.5 * error(MergeConfig(**settings))


def test_a_run_of_whole_steps_alone_is_stock(model):
    patched = attach(model, keeping(reuse_interval=3))
    assert torch.equal(tiny.sample(patched, 24, 16, steps=1), tiny.sample(model, 24, 16, steps=1))


@pytest.mark.parametrize("before,after", [(1, 2), (2, 1)], ids=["joined", "parted"])
def test_grouping_of_conditions_may_change_between_the_whole_step_and_the_next(before, after):
    """What was kept of conditions together serves them apart, and the other way round."""
    from comfyui_toma.toma_core.plan import Place
    from comfyui_toma.toma_core.schedule import Epoch
    from comfyui_toma.toma_core.session import Session

    config, place, epoch = keeping(tile_size=4), Place(), Epoch(0, 0)
    x = torch.randn(4, 64, 8, generator=torch.Generator().manual_seed(0))
    y = torch.randn(4, 64, 8, generator=torch.Generator().manual_seed(1))
    session = Session(config)
    layout = session.layout(((8, 8),), x.device)

    def groups(size):
        return [("a", "b")] if size == 2 else [("a",), ("b",)]

    def run(group, function):
        rows = slice(0, 4) if len(group) == 2 else slice(0, 2) if group == ("a",) else slice(2, 4)
        held = session.plan(place, group, epoch, layout, x[rows])
        return function(Carry(held.plan, "f", held.memory, held.is_new), rows)

    def whole(carry, rows):
        assert carry.is_whole
        return carry.give(y[rows])

    def merged(carry, rows):
        assert not carry.is_whole
        return carry.give(carry.take(y[rows]))

    for group in groups(before):
        run(group, whole)
    results = torch.cat([run(group, merged) for group in groups(after)])
    torch.testing.assert_close(results, y)


def test_memory_holds_one_epoch_and_only_tokens_that_merge_away():
    from comfyui_toma.toma_core.plan import Place
    from comfyui_toma.toma_core.schedule import Epoch
    from comfyui_toma.toma_core.session import Session

    session, place = Session(keeping(ratio=0.25, tile_size=4)), Place()
    x = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0))
    layout = session.layout(((8, 8),), x.device)
    for selection, group in enumerate([("a", "b"), ("b", "a"), ("a", "b"), ("a",), ("b",)]):
        part = x[: len(group)]
        held = session.plan(place, group, Epoch(selection, 0), layout, part)
        carry = Carry(held.plan, "f", held.memory, held.is_new)
        heads = torch.randn(len(group), 2, 64, 4)
        carry.keys(heads, heads, 2, 0)
        carry.give(part)
        # detail (and a row of zeros), keys and values of 16 of 64 tokens in float32, of as many
        # conditions as this epoch knows
        kept = [samples * (17 + 16 + 16) * 8 * 4 for samples in (len(group), 2)]
        assert session.kept_bytes in kept


def test_destinations_stand_for_themselves_and_sources_follow_as_far_as_they_are_alike():
    config = keeping(tile_size=4)
    x = torch.randn(2, 80, 8, generator=torch.Generator().manual_seed(0))
    layout = lay_out(((8, 8), (4, 4)), config)
    plan = build_plan(x, layout, config)
    merged = plan.merge(x)
    picked = x.gather(1, plan.positions()[..., None].expand(-1, -1, 8))
    assert torch.equal(merged, picked)
    assert torch.equal(plan.merge(plan.unmerge(merged)), merged)
    weights = plan.unmerge_weights.sum(-1)
    assert (weights <= 1 + 1e-6).all() and (weights >= 0).all()
    # an opposite token does not follow
    x = torch.ones(1, 16, 8)
    x[:, 8:] *= -1
    config = keeping(ratio=0.9, tile_size=4)
    plan = build_plan(x, lay_out(((4, 4),), config), config)
    assert plan.merged == 2
    signs = plan.unmerge(plan.merge(x))
    torch.testing.assert_close(signs, x, atol=1e-5, rtol=1e-5)


def test_other_methods_refuse_to_keep_detail():
    with pytest.raises(ValueError, match="keep_detail works with ToMA alone, got method CA-ToMe"):
        MergeConfig(keep_detail=True, scope=Scope.ATTENTION, matching=Matching())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_half_precision_is_kept_in_half_the_memory_and_to_its_own_precision(dtype, spread):
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0)) * spread
    x[0, 0] = 0
    x = x.to(dtype)
    packed = pack(x)
    assert sum(part.numel() * part.element_size() for part in packed) <= 0.6 * x.numel() * 2
    error = (unpack(packed).float() - x.float()).abs()
    assert (error <= x.float().abs().amax(-1, keepdim=True) / 100).all()
    assert unpack(packed).dtype == dtype and not unpack(packed)[0, 0].any()


def test_full_precision_is_kept_as_it_is():
    x = torch.randn(2, 9, 64)
    assert torch.equal(unpack(pack(x)), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [tiny.sdxl, tiny.flux])
def test_in_half_precision_little_is_lost_where_nothing_changed(make, dtype):
    model = make(dtype)
    stock = predictions(model, calls=1)[0]
    first, second, _ = predictions(attach(model, keeping(tile_size=4)))
    plain = predictions(attach(model, MergeConfig(tile_size=4)), calls=1)[0]
    assert torch.equal(first, stock)
    assert (second - stock).norm() < 0.1 * (plain - stock).norm()
