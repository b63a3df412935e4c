"""Kind K2 of public reports: a MODEL that was used gives what a fresh one gives.

Every run here is compared, bit by bit, with the same run from a newly built model of the same
weights that has never run before.
"""

from __future__ import annotations

import itertools
import random

import comfy.model_management
import comfy.sample
import comfy.samplers
import pytest
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.toma_core.config import MergeConfig
from matrix import matrix
from merging import WAYS, config_of
from small import MODELS, module_inside_a_block

A, B = (16, 12), (10, 22)
STEPS = 4


def settings(way="block"):
    """Intervals at which a choice and its weights outlive a step, and a run's end is in one."""
    return config_of(way, reuse_interval=3, weight_interval=2, tile_size=4)


class Failure(Exception):
    """Something broke in the middle of a run."""


def raise_at(step, error):
    def callback(number, *_):
        if number == step:
            raise error

    return callback


def run_a(model):
    return tiny.sample(model, *A, steps=STEPS)


def run_b(model):
    return tiny.sample(model, *B, steps=STEPS)


def run_batch(model):
    return tiny.sample(model, *A, steps=STEPS, batch=2)


def other_noise(model):
    """Of another seed: a pattern left over from it is a wrong one."""
    return tiny.noise_for(model, *A, seed=50)


def short(model):
    """Ends before its first choice is given up."""
    return tiny.sample(model, noise=other_noise(model), steps=3)


def interrupted(model):
    """The user presses cancel at the third step."""
    error = comfy.model_management.InterruptProcessingException()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        tiny.sample(model, noise=other_noise(model), steps=STEPS, callback=raise_at(2, error))


def broken(model):
    """An error inside the model, in the middle of a block."""
    handle = module_inside_a_block(model).register_forward_pre_hook(raise_in_module)
    try:
        with pytest.raises(Failure):
            tiny.sample(model, noise=other_noise(model), steps=STEPS)
    finally:
        handle.remove()


def raise_in_module(*_):
    raise Failure


def split_in_two(model):
    """Two KSamplerAdvanced nodes, the second at another size (report 17, hires fix)."""
    first = tiny.sample(model, *A, steps=STEPS, start_step=0, last_step=2)
    second = tiny.sample(
        model,
        noise=torch.zeros_like(first),
        latent=first,
        steps=STEPS,
        start_step=2,
        last_step=10000,
        disable_noise=True,
        force_full_denoise=True,
    )
    larger = torch.nn.functional.interpolate(second, scale_factor=2)
    noise = tiny.noise_for(model, *larger.shape[-2:])
    return tiny.sample(model, noise=noise, latent=larger, steps=3, denoise=0.4)


def other_dtype(model):
    """The core node for the compute dtype puts its clone behind ours."""
    changed = model.clone()
    changed.set_model_compute_dtype(torch.bfloat16)
    return tiny.sample(changed, *A, steps=STEPS)


def other_sampler(model):
    """Report 18: a different sampler fails each time."""
    return tiny.sample(model, *A, steps=STEPS, sampler="heun")


def scheduled_prompts(model):
    """Report 25: which conditions there are changes in the middle of a run."""
    early = tiny.conditioning(model, 1, start_percent=0.0, end_percent=0.5)
    late = tiny.conditioning(model, 4, start_percent=0.5, end_percent=1.0)
    return tiny.sample(model, *A, steps=STEPS, positive=early + late)


def growing(model):
    """Report 24: latent size and dtype change in the middle of a run."""

    def sampler(model, x, sigmas, extra_args, callback, disable):
        for step, sigma in enumerate(sigmas[:-1]):
            denoised = model(x, sigma.expand(len(x)), **extra_args)
            x = denoised + (x - denoised) * (sigmas[step + 1] / sigma)
            if step == 1:
                x = torch.nn.functional.interpolate(x, size=B)
            if step == 2:
                x = x.half()
        return x.float()

    sigmas = comfy.samplers.calculate_sigmas(
        model.get_model_object("model_sampling"), "normal", STEPS
    )
    noise = tiny.noise_for(model, *A)
    return comfy.sample.sample_custom(
        model,
        noise,
        3.0,
        comfy.samplers.KSAMPLER(sampler),
        sigmas,
        tiny.conditioning(model, 1),
        tiny.conditioning(model, 2),
        torch.zeros_like(noise),
        disable_pbar=True,
        seed=5,
    )


def tiled(model):
    """Report 20: tiles of two shapes, one call of the model each, within one step."""
    return tiny.sample(in_tiles(model), *A, steps=STEPS)


def in_tiles(model):
    """A double of tiled diffusion: two tiles of different widths per evaluation."""

    def by_tile(apply_model, args):
        x, timestep, c = args["input"], args["timestep"], args["c"]
        return torch.cat([apply_model(part, timestep, **c) for part in x.split((8, 4), -1)], -1)

    patched = model.clone()
    patched.set_model_unet_function_wrapper(by_tile)
    return patched


RUNS = [
    run_a,
    run_b,
    run_batch,
    short,
    interrupted,
    broken,
    split_in_two,
    other_dtype,
    other_sampler,
    scheduled_prompts,
    growing,
    tiled,
]
REPORTED_ORDER = [
    run_a,
    run_a,
    run_b,
    interrupted,
    run_a,
    short,
    run_a,
    split_in_two,
    other_dtype,
    run_a,
]


def assert_equal(result, expected, where):
    assert (result is None) == (expected is None), where
    assert result is None or torch.equal(result, expected), where


def fresh(make, config, run):
    return run(attach(make(), config))


@pytest.mark.parametrize(
    ("kind", "way"), [*itertools.product(["sdxl", "flux"], WAYS), ("sd15", "modules")]
)
def test_a_used_model_equals_a_fresh_one_in_any_order(kind, way):
    make, config = MODELS[kind], settings(way)
    runs = RUNS if way == "block" else matrix(RUNS, every=2)
    shuffled = [random.Random(f"{kind}{way}{n}").sample(runs, len(runs)) for n in range(9)]
    orders = [REPORTED_ORDER] if way == "block" else []
    orders += matrix(shuffled, every=9)
    # What a fresh model gives counts as right.
    expected = {run: fresh(make, config, run) for run in runs}
    model = attach(make(), config)
    for order in orders:
        for number, run in enumerate(order):
            where = [each.__name__ for each in order[: number + 1]]
            assert_equal(run(model), expected[run], where)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_two_branches_with_different_settings_do_not_meet(kind):
    """Report 23: two nodes with different settings, and both use the last one's."""
    make = MODELS[kind]
    configs = [
        settings(),
        MergeConfig(ratio=0.8, scope="modules", region="stripe", reuse_interval=1),
        config_of("CA-ToMe"),
        MergeConfig(ratio=0.0),
    ]
    runs = [run_a, interrupted, run_b, split_in_two]
    expected = {(c, run): fresh(make, c, run) for c in configs for run in (run_a, run_b)}
    assert len({image.sum().item() for (_, run), image in expected.items() if run is run_a}) == 4
    model = make()
    branches = [(config, attach(model, config)) for config in configs]
    for run in runs:
        for config, branch in branches:
            result = run(branch)
            if (config, run) in expected:
                assert_equal(result, expected[config, run], (config, run.__name__))
    for (config, branch), run in itertools.product(reversed(branches), (run_b, run_a)):
        assert_equal(run(branch), expected[config, run], (config, run.__name__))


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_two_nodes_in_a_row_leave_nothing_behind_either(kind):
    def patched(model):
        early = MergeConfig(ratio=0.7, end_percent=0.5)
        return attach(attach(model, early), MergeConfig(scope="modules", start_percent=0.5))

    make = MODELS[kind]
    expected = {run: run(patched(make())) for run in (run_a, run_b, tiled)}
    model = patched(make())
    for run in (run_b, broken, run_a, tiled, interrupted, run_b):
        result = run(model)
        if run in expected:
            assert_equal(result, expected[run], run.__name__)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_run_with_gradients_on_equals_one_in_inference_mode(kind, way):
    """ComfyUI samples in inference mode, but its training nodes and bare scripts do not."""
    model = MODELS[kind]()
    patched = attach(model, settings(way))
    with torch.inference_mode():
        expected = growing(patched).clone()
    for parameter in model.model.parameters():
        parameter.requires_grad_(True)
    with torch.enable_grad():
        assert torch.equal(growing(patched), expected)


FLUX_PAIRS = [
    # report, first size and second size in latent rows and columns
    (16, (160, 96), (230, 174)),
    (17, (152, 104), (304, 208)),
    (18, (152, 114), (136, 114)),
    (22, (158, 128), (134, 128)),
]


@pytest.mark.parametrize(("report", "first", "second"), matrix(FLUX_PAIRS, every=4))
def test_flux_token_counts_of_public_reports_follow_one_another(report, first, second):
    """3840 then 10005 tokens (16), 3952 then 15808 (17), 4332 then 3876 (18), 5056 then 4288
    (22)."""

    def make():
        return attach(tiny.flux(depth=1, depth_single_blocks=1), MergeConfig())

    used = make()
    for size in (first, second, first):
        image = tiny.sample(used, *size, steps=1)
        assert torch.equal(image, tiny.sample(make(), *size, steps=1)), size
