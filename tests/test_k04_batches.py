"""K4: the grouping of conditions into model calls, and the batch, never change one image."""

from __future__ import annotations

import itertools

import pytest
import small
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from grouping import JOINT, SPLIT, grouping
from matrix import matrix
from merging import SCOPES, WAYS, config_of

SIZE = (12, 16)

AMPLIFIED = 250
"""How far rounding may grow beyond what stock itself shows: the steepest slope of the assignment
softmax, 1 / (4 x its temperature of 0.001), where two destinations are equally near; everywhere
else it damps. A pattern shared or mistaken moves an image 10,000 times as far as stock's rounding.
"""


@pytest.fixture(scope="module")
def models():
    return {name: make() for name, make in small.MODELS.items()}


def patched(model, way="block", **settings):
    return attach(model, config_of(way, reuse_interval=2, **settings))


def distance(one, other):
    """Largest difference of two results, in standard deviations of a result."""
    return float((one - other).abs().max() / one.std())


def area(model, conditioning, width, seed=3):
    """One more condition for the left half of the picture, as ConditioningSetArea adds it."""
    half = {"area": (SIZE[0], width // 2, 0, 0), "strength": 1.0, "set_area_to_bounds": False}
    return [*conditioning, *tiny.conditioning(model, seed, tokens=77, **half)]


def prompts(model, kind):
    """Positive and negative prompt: lengths in tokens, or an area condition beside the whole."""
    lengths = {"77/77": (77, 77), "77/154": (77, 154), "231/77": (231, 77), "area": (77, 77)}
    positive, negative = (
        tiny.conditioning(model, seed, tokens=tokens)
        for seed, tokens in zip((1, 2), lengths[kind], strict=True)
    )
    if kind == "area":
        positive = area(model, positive, SIZE[1])
    return {"positive": positive, "negative": negative}


PROMPTS = ["77/77", "77/154", "231/77", "area"]
CASES = matrix(
    itertools.product(PROMPTS, [1.0, 1.1, 7.0], [1, 2, 3], SCOPES, small.MODELS), every=30
)


@pytest.mark.parametrize(("kind", "cfg", "batch", "scope", "name"), CASES)
def test_grouping_and_batch_change_no_image(models, kind, cfg, batch, scope, name):
    stock = models[name]
    options = {"cfg": cfg, "steps": 3, **prompts(stock, kind)}
    noise = tiny.noise_for(stock, *SIZE, batch)

    def differences(model):
        """Split calls against calls that are joint by turns, and against each image alone."""
        with grouping(SPLIT):
            apart = tiny.sample(model, noise=noise, **options)
            alone = [tiny.sample(model, noise=one[None], **options) for one in noise]
        with grouping(JOINT, SPLIT, JOINT) as calls:
            mixed = tiny.sample(model, noise=noise, **options)
        joint, split, again = (sum(1 for at, _ in calls if at == step) for step in range(3))
        assert joint == again <= split
        # Flux does not batch prompts of unequal length; with cfg 1 one prompt runs alone.
        alike = kind == "77/77" or (kind == "area" and cfg != 1) or name != "flux"
        assert joint < split or cfg == 1 or not alike
        return torch.tensor([distance(apart, mixed), distance(apart, torch.cat(alone))]), apart

    own, stock_image = differences(stock)
    ours, image = differences(patched(stock, scope))
    floor = torch.finfo(torch.float32).eps
    assert (ours <= AMPLIFIED * own.clamp_min(floor)).all(), (own, ours)
    # Every image of the batch merges, not only the first (reports 39 and 41).
    assert all(distance(a, b) > 1e-3 for a, b in zip(stock_image, image, strict=True))


@pytest.mark.parametrize("name", small.MODELS)
def test_ratio_0_is_stock_in_every_grouping(models, name):
    stock = models[name]
    options = {"cfg": 7.0, "steps": 2, "batch": 2, **prompts(stock, "area")}
    for pattern in ([JOINT], [SPLIT], [JOINT, SPLIT]):
        with grouping(*pattern):
            expected = tiny.sample(stock, *SIZE, **options)
            assert torch.equal(expected, tiny.sample(patched(stock, ratio=0), *SIZE, **options))


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_separate_calls_at_one_sigma_share_no_pattern(models, name):
    """Report 34: SDXL, batch 4, condition and uncondition in separate calls at one sigma.

    A pattern shared by both would make the guided result depend on which of them came first.
    """
    model = patched(models[name])
    noise = tiny.noise_for(model, *SIZE, 4)
    one, two = (tiny.conditioning(model, seed, tokens=77) for seed in (1, 2))
    with grouping(SPLIT):
        # At cfg 0.5 both weigh the same: exchanged, they must give the same images.
        there = tiny.sample(model, noise=noise, cfg=0.5, steps=3, positive=one, negative=two)
        back = tiny.sample(model, noise=noise, cfg=0.5, steps=3, positive=two, negative=one)
    assert distance(there, back) < 1e-4


def test_a_step_of_one_call_of_two_then_steps_of_two_calls_of_one(models):
    """Report 35: Flux, step 1 as a batch of 2, step 2 as two batches of 1, and back."""
    model = patched(models["flux"])
    with grouping(JOINT, SPLIT) as calls:
        image = tiny.sample(model, *SIZE, cfg=2.0, steps=4)
    assert [len(condition) for _, condition in calls] == [2, 1, 1, 2, 1, 1]
    assert torch.isfinite(image).all()


INPAINTING = {
    "sdxl-inpaint": (tiny.sdxl, 9),
    "sd15-inpaint": (tiny.sd15, 9),
    "flux-fill": (tiny.flux, 96),
    "flux-canny": (tiny.flux, 32),
}


@pytest.mark.parametrize(("kind", "way"), matrix(itertools.product(INPAINTING, WAYS), every=3))
def test_models_with_more_channels_in_than_out_merge(kind, way):
    """Report 37: inpainting, Fill, Canny and Depth models take the picture and a mask besides."""
    make, channels = INPAINTING[kind]
    model = make(in_channels=channels)
    noise = tiny.noise_for(model, *SIZE, 2)
    mask = torch.zeros(1, 1, *SIZE)
    mask[..., :8] = 1
    extra = {"concat_latent_image": torch.zeros_like(noise[:1]), "concat_mask": mask}
    options = {
        "noise": noise,
        "noise_mask": mask,
        "positive": tiny.conditioning(model, 1, **extra),
        "negative": tiny.conditioning(model, 2, **extra),
    }
    stock = tiny.sample(model, **options)
    merged = tiny.sample(patched(model, way), **options)
    assert torch.isfinite(merged).all() and not torch.equal(stock, merged)
    # Outside the mask the picture is the one that was given.
    assert torch.equal(stock[..., 8:], merged[..., 8:])
    assert torch.equal(stock, tiny.sample(patched(model, way, ratio=0), **options))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [2, 4])
def test_flux_batches_carry_positions_and_masks(models, way, batch):
    """Report 43: Flux, batch above 1, with an attention mask."""
    model = patched(models["flux"], way)
    text = 7
    generator = torch.Generator().manual_seed(0)
    rows = text + SIZE[0] // 2 * SIZE[1] // 2
    # A mask over text only grows with the picture: picture tokens see everything.
    mask = {
        "attention_mask": torch.randn(1, rows, rows, generator=generator),
        "attention_mask_img_shape": (SIZE[0] // 2, SIZE[1] // 2),
    }
    positive = tiny.conditioning(model, 1, tokens=text, **mask)
    noise = tiny.noise_for(model, *SIZE, batch)
    stock = tiny.sample(models["flux"], noise=noise, positive=positive)
    together = tiny.sample(model, noise=noise, positive=positive)
    alone = torch.cat([tiny.sample(model, noise=one[None], positive=positive) for one in noise])
    assert distance(together, alone) < 1e-4
    assert distance(stock, together) > 1e-4
    unmasked = tiny.sample(model, noise=noise, positive=tiny.conditioning(model, 1, tokens=text))
    assert distance(unmasked, together) > 1e-3


MISSING = ["cond_or_uncond", "uuids", "sigmas", "everything"]


@pytest.mark.parametrize(
    ("name", "cfg", "missing"),
    matrix(itertools.product(["sdxl", "flux"], [1.0, 7.0], MISSING), every=2),
)
def test_another_sampling_function_may_leave_out_what_it_likes(models, name, cfg, missing, caplog):
    """Reports 40 and 42: cfg 1 has one half only; another pack drops keys of ComfyUI's own."""

    def drops_keys(apply_model, parameters):
        options = dict(parameters["c"].get("transformer_options", {}))
        for key in list(options) if missing == "everything" else [missing]:
            options.pop(key, None)
        c = {**parameters["c"], "transformer_options": options}
        return apply_model(parameters["input"], parameters["timestep"], **c)

    def run(model):
        model = model.clone()
        model.set_model_unet_function_wrapper(drops_keys)
        return tiny.sample(model, *SIZE, cfg=cfg, batch=2)

    stock, ours = run(models[name]), run(patched(models[name]))
    if missing in ("sigmas", "everything"):
        # Without a noise level no step is known: the model runs as it is, and this is said.
        assert torch.equal(stock, ours)
        assert any("Inactive" in message for message in caplog.messages)
    else:
        assert distance(stock, ours) > 1e-3
