"""Kind K3 of public reports: nothing of ours outlives its branch, its run or its MODEL."""

from __future__ import annotations

import functools
import gc
import itertools
import subprocess
import sys
from pathlib import Path

import comfy.model_management
import leaks
import pytest
import small
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.options import KEY
from comfyui_toma.nodes.token_merge import METHODS
from comfyui_toma.nodes.toma import ToMAPatchFlux, ToMAPatchModel, ToMAPatchSDXL
from comfyui_toma.toma_core.config import MergeConfig
from matrix import matrix
from merging import SCOPES, patch

NODES = [
    (ToMAPatchModel, small.sdxl),
    (ToMAPatchModel, small.sd15),
    (ToMAPatchModel, small.flux),
    (ToMAPatchSDXL, small.sdxl),
    (ToMAPatchFlux, small.flux),
]


def of_node(node, model, **values):
    return node.execute(model, **values)[0]


PATCHED = [
    (make, functools.partial(of_node, node, scope=scope))
    for (node, make), scope in itertools.product(NODES, SCOPES)
]
PATCHED += [
    (make, functools.partial(patch, method=method))
    for make, method in itertools.product((small.sdxl, small.flux), METHODS)
]
"""What makes a model, and a node with one of its ways of merging."""


class Failure(Exception):
    """Something broke in the middle of a run."""


def fail(*_):
    raise Failure


def fingerprint(model):
    return {
        **leaks.of_code(),
        **leaks.of_module(model.model),
        "options": leaks.of_options(model.model_options),
        "wrappers": leaks.of_options(model.wrappers),
        "callbacks": leaks.of_options(model.callbacks),
        "patches": leaks.of_options(model.patches),
        "object_patches": leaks.of_options(model.object_patches),
        "injections": leaks.of_options(model.injections),
    }


def all_names(before, after):
    """Names that changed, went or came."""
    return leaks.changed(before, after) + leaks.changed(after, before)


def test_importing_the_pack_changes_nothing_of_comfyui():
    """Report 30: a patch at import breaks graphs that never use the node."""
    program = Path(leaks.__file__).with_name("leaks_of_import.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *changes, looked_at = done.stdout.splitlines()
    assert changes == []
    assert int(looked_at) > 3000


@pytest.mark.parametrize(("make", "node"), matrix(PATCHED, every=2))
def test_nothing_is_left_by_a_run_an_error_a_deletion_or_a_reload(make, node):
    """Patch, sample, raise in the middle, delete, unload, reload: every fingerprint stays."""
    model = make()
    stock = tiny.sample(model)
    before = fingerprint(model)
    patched = node(model)
    assert all_names(before, fingerprint(model)) == [], "patching"
    assert not torch.equal(tiny.sample(patched), stock)
    assert all_names(before, fingerprint(model)) == [], "sampling"
    with pytest.raises(Failure):
        tiny.sample(patched, callback=fail)
    handle = small.module_inside_a_block(model).register_forward_pre_hook(fail)
    with pytest.raises(Failure):
        tiny.sample(patched)
    handle.remove()
    assert all_names(before, fingerprint(model)) == [], "an error"
    del patched
    gc.collect()
    comfy.model_management.unload_all_models()
    assert torch.equal(tiny.sample(model), stock)
    assert all_names(before, fingerprint(model)) == [], "a reload"


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_branch_without_us_is_stock_however_often_the_queue_runs(kind):
    """Report 27: from the second generation on, both samplers are patched. Report 29: a bypassed
    node leaves its blocks patched."""
    model = small.MODELS[kind]()
    stock = tiny.sample(model)
    patched = attach(model, MergeConfig())
    merged = tiny.sample(patched)
    assert not torch.equal(merged, stock)
    for _ in range(2):
        assert torch.equal(tiny.sample(model), stock)
        assert torch.equal(tiny.sample(patched), merged)
        assert torch.equal(tiny.sample(model.clone()), stock)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_clones_before_and_after_do_not_see_one_another(kind):
    """Report 32: a patch on the inner model, which every clone shares."""
    model = small.MODELS[kind]()
    sibling = model.clone()
    stock = tiny.sample(model)
    gentle, strong = (attach(model, MergeConfig(ratio=ratio)) for ratio in (0.3, 0.8))
    child = gentle.clone()
    images = [tiny.sample(each) for each in (gentle, strong, child, sibling, model)]
    assert torch.equal(images[0], images[2])
    assert torch.equal(images[3], stock) and torch.equal(images[4], stock)
    assert not torch.equal(images[0], images[1])
    assert KEY not in model.model_options["transformer_options"]
    assert len(gentle.model_options["transformer_options"][KEY]) == 1
    # A node behind one branch changes that branch alone.
    attach(child, MergeConfig(ratio=0.5))
    assert torch.equal(tiny.sample(child), images[0])


def test_another_model_runs_stock_while_a_cached_node_never_runs_again():
    """Report 28: a global patch that a cached node cannot take back breaks the next SD 1.5 pass."""
    sdxl, sd15 = small.sdxl(), small.sd15()
    stock = tiny.sample(sd15)
    tiny.sample(attach(sdxl, MergeConfig()))
    with pytest.raises(Failure):
        tiny.sample(attach(sdxl, MergeConfig()), callback=fail)
    assert torch.equal(tiny.sample(sd15), stock)


@pytest.mark.parametrize("kind", small.MODELS)
def test_a_node_switched_off_is_as_if_it_were_not_there(kind):
    """Report 28's "disabled": ratio 0 leaves no setting and no wrapper in the MODEL."""
    model = small.MODELS[kind]()
    off = attach(model, MergeConfig(ratio=0.0))
    assert leaks.of_options(off.model_options) == leaks.of_options(model.model_options)
    assert leaks.of_options(off.wrappers) == leaks.of_options(model.wrappers)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_stock_run_of_another_model_inside_our_run_is_stock(kind):
    """A node may sample another model of the same classes between two of our steps."""
    model, other = small.MODELS[kind](), small.MODELS[kind]()
    stock = tiny.sample(other)
    alone = tiny.sample(attach(model, MergeConfig()), 24, 16)
    inside = []

    def sample_the_other(*_):
        inside.append(tiny.sample(other))

    merged = tiny.sample(attach(model, MergeConfig()), 24, 16, callback=sample_the_other)
    assert len(inside) == 3 and all(torch.equal(image, stock) for image in inside)
    assert torch.equal(merged, alone)
