"""Kind K12 of public reports: what a run needs dies with it, and a MODEL stays free to go."""

from __future__ import annotations

import gc
import itertools
import weakref

import comfy.model_management
import pytest
import small
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.options import KEY
from comfyui_toma.nodes.run import Run
from comfyui_toma.toma_core import session
from comfyui_toma.toma_core.config import MergeConfig
from matrix import matrix
from merging import KEEPING, WAYS, config_of
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = [(16, 16), (24, 16)]


def live_tensors():
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def forget_loaded_models():
    """What ComfyUI does when it needs the memory."""
    comfy.model_management.unload_all_models()
    gc.collect()
    comfy.model_management.cleanup_models()


def cancel(*_):
    raise comfy.model_management.InterruptProcessingException


def run_or_cancel(model, size, callback=None):
    try:
        tiny.sample(model, *size, callback=callback)
    except comfy.model_management.InterruptProcessingException:
        assert callback is cancel


@pytest.fixture
def patterns(monkeypatch):
    """Every session, run and pattern that is made, without keeping it alive."""
    made = []

    def note(owner, name):
        function = getattr(owner, name)

        def noted(*args, **kwargs):
            result = function(*args, **kwargs)
            made.append(weakref.ref(args[0] if name == "__init__" else result))
            return result

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (session, "build_plan"),
        (session, "reweigh"),
        (session, "lay_out"),
        (session, "join_plans"),
        (session.Session, "__init__"),
        (Run, "__init__"),
    ):
        note(owner, name)
    return made


@pytest.mark.parametrize(
    ("kind", "way"), matrix(itertools.product(["sdxl", "flux"], WAYS), every=4)
)
def test_twenty_runs_of_alternating_sizes_leave_no_tensor(kind, way, patterns):
    """Report 80: caches that outlive the run. One run of the twenty is cancelled."""
    model = small.MODELS[kind]()
    patched = attach(model, config_of(way, reuse_interval=2 if way in KEEPING else 1))
    for size in SIZES:
        # ComfyUI's own first run leaves things of its own.
        tiny.sample(patched, *size)
    before = live_tensors()
    counts = []
    for number, size in zip(range(20), itertools.cycle(SIZES), strict=False):
        run_or_cancel(patched, size, cancel if number == 10 else None)
        if number in (9, 10, 19):
            counts.append(live_tensors())
    # Fewer is no growth: what earlier tests left may go in the meantime.
    assert max(counts) <= before
    assert len(patterns) > 100
    assert [each for each in patterns if each() is not None] == []


@pytest.mark.parametrize(("kind", "way"), matrix(itertools.product(small.MODELS, WAYS), every=3))
def test_nothing_of_a_run_waits_for_the_garbage_collector(kind, way, patterns):
    """Patterns go as soon as the run ends, also after an abort: memory is free for the VAE."""
    patched = attach(small.MODELS[kind](), config_of(way))
    gc.collect()
    gc.disable()
    try:
        for callback in (None, cancel):
            run_or_cancel(patched, (16, 16), callback)
            alive = [each() for each in patterns if each() is not None]
            tensors = [each for each in alive if isinstance(each, session.MergePlan)]
            assert patterns and tensors == []
    finally:
        gc.enable()


@pytest.mark.parametrize(("kind", "way"), matrix(itertools.product(small.MODELS, WAYS), every=3))
def test_the_inner_model_dies_with_the_model(kind, way):
    """No strong reference of ours keeps the weights."""
    model = small.MODELS[kind]()
    patched = attach(model, config_of(way))
    run_or_cancel(patched, (8, 8))
    run_or_cancel(patched, (8, 8), cancel)
    inner = weakref.ref(model.model)
    del model, patched
    forget_loaded_models()
    assert inner() is None


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_loaded_model_patched_twice_unloads_and_goes(kind):
    """Report 82: a clone of a loaded model, patched twice, is never unloaded."""
    forget_loaded_models()
    model = small.MODELS[kind]()
    comfy.model_management.load_models_gpu([model])
    patched = attach(attach(model.clone(), MergeConfig()), MergeConfig(ratio=0.3))
    tiny.sample(patched, 8, 8)
    tiny.sample(model, 8, 8)
    inner = weakref.ref(model.model)
    comfy.model_management.unload_all_models()
    assert comfy.model_management.current_loaded_models == []
    del model, patched
    forget_loaded_models()
    assert inner() is None


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", small.MODELS)
def test_patching_and_cloning_make_no_tensor(kind):
    model = small.MODELS[kind]()
    tiny.sample(attach(model, MergeConfig()), 8, 8)
    before = live_tensors()
    with Operations() as operations:
        patched = attach(model, MergeConfig())
        clones = [patched.clone() for _ in range(5)]
    assert operations.count == 0
    assert live_tensors() == before
    settings = patched.model_options["transformer_options"][KEY]
    for clone in clones:
        # Plain values: older ComfyUI copies them with the MODEL, newer shares one object.
        assert clone.model_options["transformer_options"][KEY] == settings


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_run_copies_no_tensor_or_module_of_another_node(kind):
    """Report 81: deep-copying model options duplicates other patches' tensors and modules."""
    model = small.MODELS[kind]()
    theirs = {"module": torch.nn.Linear(8, 8), "tensor": torch.randn(8)}
    patched = attach(model, MergeConfig())
    patched.model_options["transformer_options"]["their_node"] = theirs
    met = []

    def look(apply_model, args):
        met.append(args["c"]["transformer_options"]["their_node"])
        return apply_model(args["input"], args["timestep"], **args["c"])

    patched.set_model_unet_function_wrapper(look)
    tiny.sample(patched, 8, 8)
    assert met
    for options in met:
        assert all(options[name] is each for name, each in theirs.items())


@pytest.mark.parametrize("way", ["block", "ToMe"])
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_run_holds_no_more_than_its_patterns(kind, way):
    """Between two steps of our run there are as many tensors at the tenth step as at the third:
    old patterns are given up, not piled up."""
    counts = []

    def count(step, *_):
        if step in (3, 10):
            counts.append(live_tensors())

    patched = attach(small.MODELS[kind](), config_of(way, reuse_interval=1))
    tiny.sample(patched, 16, 16, steps=12, callback=count)
    assert counts[0] == counts[1]
