"""K11: a compiled model merges as an uncompiled one, compiled once per size, in any order."""

from __future__ import annotations

import itertools
import os

import comfy.ldm.flux.math
import comfy.ldm.modules.attention
import merging
import pytest
import small
import tiny
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.report import Report
from comfyui_toma.toma_core.config import MergeConfig
from matrix import matrix
from neighbours import NEIGHBOURS
from torch._dynamo.utils import counters

WAYS = [way for way in merging.WAYS if way != "CA-ToMe"]
"""CA-ToMe leaves another number of tokens at every choice: it is compiled for each of them."""
ORDERS = ["compiled before ours", "compiled after ours"]
SIZES = [(16, 16), (24, 16), (16, 24)]
STEPS = 4


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """A compiler without memory, and attention as on a GPU.

    The attention that ComfyUI takes on a CPU asks for free memory and breaks every graph.
    """
    for module in (comfy.ldm.modules.attention, comfy.ldm.flux.math):
        monkeypatch.setattr(module, "optimized_attention", attention_pytorch)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def reports(monkeypatch):
    found = []
    close = Report.close

    def keep(self, finished):
        found.append((self.blocks, self.reasons))
        close(self, finished)

    monkeypatch.setattr(Report, "close", keep)
    return found


def make(name):
    """Every kind of block once and one kind twice: tracing takes its time."""
    if name == "flux":
        return tiny.flux(depth=1, depth_single_blocks=2)
    return small.MODELS[name]()


def without_options(guards):
    """What TorchCompileModel leaves unguarded."""
    return ["transformer_options" not in guard.name for guard in guards]


def compiled(model, keys=("diffusion_model",)):
    """The core's TorchCompileModel, but for its backend: ``eager`` traces and builds nothing."""
    model = model.clone()
    options = {"guard_filter_fn": without_options}
    set_torch_compile_wrapper(model, backend="eager", options=options, keys=list(keys))
    return model


def ours(model, way="block"):
    return attach(model, merging.config_of(way, reuse_interval=2, weight_interval=2))


def chain(model, way, order, keys=("diffusion_model",)):
    if order == ORDERS[0]:
        return ours(compiled(model, keys), way)
    return compiled(ours(model, way), keys)


def graphs():
    return counters["stats"]["unique_graphs"]


def breaks():
    return sum(counters["graph_break"].values())


def run(model, size, batch=1):
    return tiny.sample(model, *size, batch=batch, steps=STEPS, cfg=1.0)


# One order of each host with the way that is set by default; everything on request.
CASES = [
    ("flux", "block", ORDERS[0], SIZES[:2]),
    ("sdxl", "block, detail kept", ORDERS[1], SIZES[:1]),
    ("flux", "ToMe", ORDERS[1], SIZES[:1]),
]
if os.environ.get("TOMA_FULL"):
    CASES = [(*case, SIZES) for case in itertools.product(small.MODELS, WAYS, ORDERS)]


@pytest.mark.parametrize(("name", "way", "order", "sizes"), CASES)
def test_merging_is_compiled_once_per_size_and_never_breaks_a_graph(
    reports, name, way, order, sizes
):
    """Smallest input of the kind: tiny Flux, 16 x 16, then 24 x 16."""
    model = make(name)
    eager = [run(ours(model, way), size) for size in sizes]
    expected = list(reports)
    reports.clear()
    patched = chain(model, way, order)
    for number, size in enumerate(sizes):
        # Queued twice: the second run finds everything compiled.
        for _ in range(2):
            image = run(patched, size)
            assert torch.equal(image, eager[number])
            assert graphs() <= number + 1, "compiled more than once for a size"
    assert graphs() > 0 and breaks() == 0
    assert reports == [report for report in expected for _ in range(2)]


def test_every_step_of_a_run_stays_compiled(monkeypatch):
    """Neither a step that chooses anew nor one that reuses makes later steps run uncompiled."""
    model = make("flux")
    seen = []
    tiny.sample(
        chain(model, "block", ORDERS[0]),
        *SIZES[0],
        steps=9,
        cfg=1.0,
        callback=lambda *_: seen.append((graphs(), breaks())),
    )
    assert seen[-1] == (1, 0) and seen[1:] == [(1, 0)] * 8


BLOCKS = {
    "flux": ["diffusion_model.double_blocks.0", "diffusion_model.single_blocks.1"],
    "sdxl": ["diffusion_model.middle_block.1.transformer_blocks.0"],
}


@pytest.mark.parametrize(("name", "order"), matrix(itertools.product(BLOCKS, ORDERS), every=2))
def test_blocks_compiled_by_themselves_merge_too(reports, name, order):
    """As packs do that compile block by block."""
    model = make(name)
    expected = run(ours(model), SIZES[0])
    assert torch.equal(expected, run(chain(model, "block", order, BLOCKS[name]), SIZES[0]))
    assert reports[0] == reports[1] and reports[0][0]


@pytest.mark.parametrize("neighbour", ["EasyCache", "LoRA"])
@pytest.mark.parametrize(
    "order", matrix(list(itertools.permutations(["compile", "ours", "neighbour"])), every=6)
)
def test_three_nodes_in_any_order_are_the_same_graph(neighbour, order):
    """Report 77: compile, then EasyCache: no effect, or errors. Report 79: a LoRA is ignored."""
    model = make("flux")
    steps = {
        "compile": compiled,
        "ours": ours,
        "neighbour": lambda each: NEIGHBOURS["flux"][neighbour].patch(each, []),
    }
    plain, built = model, model
    for name in order:
        built = steps[name](built)
        plain = plain if name == "compile" else steps[name](plain)
    expected = run(plain, SIZES[0])
    assert torch.equal(expected, run(built, SIZES[0]))
    assert graphs() > 0
    assert not torch.equal(expected, run(ours(model), SIZES[0]))


def test_ratio_0_beside_a_compiled_model_is_stock():
    model = compiled(make("flux"))
    stock = run(model, SIZES[0])
    assert torch.equal(stock, run(attach(model, MergeConfig(ratio=0)), SIZES[0]))
    assert graphs() == 1
