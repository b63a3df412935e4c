"""Kind K9 of public reports: the same seed gives the same image, and no random state moves."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
import small
import tiny
import torch
from comfy_extras.nodes_hypertile import HyperTile
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.run import SamplingRun
from comfyui_toma.toma_core.config import MergeConfig, Region
from matrix import matrix
from merging import WAYS, config_of

STEPS = 4


def run(model, sampler="euler_ancestral"):
    return tiny.sample(model, steps=STEPS, sampler=sampler)


def random_state():
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())


@pytest.mark.parametrize(
    ("kind", "way", "region"),
    matrix(itertools.product(small.MODELS, WAYS, Region), every=9),
)
def test_the_same_seed_gives_the_same_image(kind, way, region):
    """Twice in a row, queued again, after another workflow, and from a node that ran again."""
    make, config = small.MODELS[kind], config_of(way, region=region)
    model = make()
    patched = attach(model, config)
    first = run(patched)
    assert torch.equal(run(patched), first)
    another = attach(small.sdxl(), MergeConfig(ratio=0.8, region="global"))
    tiny.sample(another, 24, 8, sampler="dpmpp_sde", batch=2)
    torch.manual_seed(99)
    random.seed(99)
    assert torch.equal(run(patched), first)
    assert torch.equal(run(attach(model, config)), first)
    assert torch.equal(run(attach(make(), config)), first)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
@pytest.mark.parametrize("way", WAYS)
def test_no_call_of_ours_moves_a_global_random_state(kind, way, monkeypatch):
    """Before and after every model call, and over the making and closing of a run."""
    moved = []

    def unmoved(function):
        def checked(*args, **kwargs):
            before = random_state()
            result = function(*args, **kwargs)
            moved.append(random_state() != before)
            return result

        return checked

    monkeypatch.setattr(SamplingRun, "apply_model", unmoved(SamplingRun.apply_model))
    monkeypatch.setattr(SamplingRun, "close", unmoved(SamplingRun.close))
    model = small.MODELS[kind]()
    before = random_state()
    patched = attach(model, config_of(way, reuse_interval=2))
    assert random_state() == before
    run(patched)
    assert len(moved) > STEPS and not any(moved)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_what_comes_after_our_run_draws_the_numbers_it_would_draw_without_us(kind):
    """An ancestral sampler draws its noise between our steps."""
    model = small.MODELS[kind]()
    states = []
    for each in (model, attach(model, MergeConfig())):
        torch.manual_seed(7)
        random.seed(7)
        run(each)
        states.append(random_state())
    assert states[0] == states[1]


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
@pytest.mark.parametrize("sampler", ["euler_ancestral", "dpmpp_sde"])
def test_ratio_0_is_stock_with_samplers_that_draw_noise(kind, sampler):
    model = small.MODELS[kind]()
    stock = run(model, sampler)
    assert torch.equal(run(attach(model, MergeConfig(ratio=0.0)), sampler), stock)
    assert not torch.equal(run(attach(model, MergeConfig()), sampler), stock)


def test_no_counter_of_ours_survives_a_cached_node():
    """Report 72: HyperTile counts calls in its node, so that a second queue of the cached node
    differs. With the core node as neighbour ours adds no such difference."""
    model = small.sd15()

    def both(model):
        # Four tiles of 16 x 16 latent pixels, and nothing drawn at random.
        return HyperTile.execute(model, 128, 1, 0, False)[0]

    patched = both(attach(model, MergeConfig()))
    first = tiny.sample(patched, 32, 32, steps=1)
    assert not torch.equal(first, tiny.sample(attach(model, MergeConfig()), 32, 32, steps=1))
    assert torch.equal(tiny.sample(patched, 32, 32, steps=1), first)
    assert torch.equal(tiny.sample(both(attach(model, MergeConfig())), 32, 32, steps=1), first)
