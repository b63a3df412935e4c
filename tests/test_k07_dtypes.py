"""K7: any dtype, partly loaded models, and no operation that a backend lacks or waits for."""

from __future__ import annotations

import itertools

import comfy.model_management
import comfy.supported_models
import neighbours
import pytest
import small
import tiny
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.token_merge import METHODS
from comfyui_toma.toma_core.config import MergeConfig, Region
from comfyui_toma.toma_core.detail import Carry
from comfyui_toma.toma_core.merge import LinearPlan
from comfyui_toma.toma_core.planning import build_plan, lay_out, reweigh
from comfyui_toma.toma_core.regions import build_layout
from direct import Direct
from matrix import matrix
from merging import KEEPING, config_of
from probe import _on_meta
from recorder import Recorder, known_to_mps

SCOPES = ["block", "modules", "attention"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZE = (12, 16)

VIEWS = {
    *("view", "_unsafe_view", "_reshape_alias", "alias", "detach", "expand", "transpose"),
    *("permute", "unsqueeze", "squeeze", "slice", "select", "split", "diagonal"),
}
MERGING = VIEWS | {"bmm", "mm", "cat", "clone", "add", "sub", "index_select", "_to_copy"}
"""What merge and unmerge may run: matrix products, copies and rows by index. Every backend of
torch has these; none waits for the device. DirectML and MPS have failed at gather, scatter and
sort, CUDA graphs fail at whatever reads a number (reports 63 and 64)."""

SELECTING = MERGING | {
    *("arange", "mul", "div", "linalg_vector_norm", "clamp_min", "clamp_", "sum", "argmax"),
    *(
        "maximum",
        "amax",
        "eq",
        "ge",
        "bitwise_not",
        "bitwise_or",
        "bitwise_and",
        "masked_fill",
        "_softmax",
    ),
    *("fill_", "new_zeros", "new_full", "empty_like", "stack", "copy_"),
}
"""What choosing and weighing may run besides."""

KEEPING_DETAIL = SELECTING | {
    *("any", "zeros", "zeros_like", "full_like", "scatter", "sort", "gather"),
    *("abs", "round"),
}
"""What a whole step may run besides."""

MERGING_GROUPS = (
    MERGING
    | {"arange", "eq", "mul", "div", "clamp_min", "masked_fill"}
    | {
        *("amax", "maximum", "linalg_vector_norm"),
    }
)
"""What merge and unmerge of the methods that match pairs may run: no sum by atomic additions."""

MATCHING = SELECTING | {
    *("randint", "remainder", "gather", "max", "repeat", "where", "index", "index_copy", "lt"),
    *("scatter", "sort", "cumsum", "zeros", "zeros_like", "split_with_sizes", "constant_pad_nd"),
    *("searchsorted", "clamp_max", "floor_divide", "ne", "lift_fresh"),
}
"""What matching pairs and making their tables may run besides."""

WAITING = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "unique"}
"""Operations at which the host waits for the device."""


def smallest(host):
    return small.sdxl() if host == "sdxl" else tiny.flux()


@pytest.fixture(scope="module")
def models():
    return {host: smallest(host) for host in ("sdxl", "flux")}


def awkward(dtype):
    """640 channels of grids of 9 x 7: a zero token, spread 3000, all alike, and random."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 63, 640, generator=generator)
    x[0, 5] = 0
    x[1] *= 3000
    x[2] = x[2, :1]
    return x.to(dtype)


@pytest.mark.parametrize("region", Region)
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_tokens_stay_finite_in_every_dtype(dtype, region):
    """A norm in fp16 overflows at 640 channels of spread 3000: the metric is fp32 throughout."""
    config = MergeConfig(region=region)
    layout = build_layout(((9, 7),), config)
    x = awkward(dtype)
    chosen = build_plan(x, layout, config)
    for plan in (chosen, reweigh(chosen, x, config)):
        merged = plan.merge(x)
        back = plan.unmerge(merged)
        for y in (merged, back):
            assert torch.isfinite(y).all() and y.dtype == dtype and y.device == x.device
        assert plan.merge_weights.dtype == plan.unmerge_weights.dtype == dtype
        # Averages never leave the range of what they average; rounding is that of the dtype.
        slack = 1 + 4 * torch.finfo(dtype).eps
        assert (back.abs().amax((1, 2)) <= x.abs().amax((1, 2)) * slack).all()
        # Tokens that are all alike merge without loss.
        assert torch.allclose(back[2].float(), x[2].float(), rtol=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("region", Region)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_runs_allowed_operations_only(dtype, region):
    config = MergeConfig(region=region)
    for grids in (((16, 16),), ((9, 7), (5, 3))):
        layout = build_layout(grids, config)
        x = torch.randn(2, layout.tokens, 64).to(dtype)
        with Recorder() as selecting:
            plan = build_plan(x, layout, config)
            plan = reweigh(plan, x, config)
        with Recorder() as merging:
            plan.unmerge(plan.merge(x))
            whole = torch.cat((x[:, :4], x), 1)
            plan.unmerge(plan.merge(whole, 4), 4)
        assert set(selecting.ops) <= SELECTING, set(selecting.ops) - SELECTING
        assert set(merging.ops) <= MERGING, set(merging.ops) - MERGING
        # Weights stand ready in the dtype of the model: nothing is converted when applied.
        assert merging.ops["_to_copy"] == 0
        assert not WAITING & (SELECTING | MERGING)


@pytest.mark.parametrize("region", Region)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keeping_detail_runs_allowed_operations_only(dtype, region):
    config = MergeConfig(region=region, keep_detail=True)
    layout = build_layout(((9, 7), (5, 3)), config)
    x = torch.randn(2, layout.tokens, 64).to(dtype)
    plan = build_plan(x, layout, config)
    kept = {}
    for whole, allowed in ((True, KEEPING_DETAIL), (False, MERGING | {"mul"})):
        with Recorder() as recorder:
            carry = Carry(plan, "block", kept, whole)
            tokens = carry.take(x)
            keys, _ = carry.keys(tokens, tokens, 1, 0)
            result = carry.give(tokens)
        # Whatever ran, attention sees all keys, and all tokens get a result.
        assert keys.shape == result.shape == x.shape
        assert set(recorder.ops) <= allowed, set(recorder.ops) - allowed


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matching_pairs_runs_allowed_operations_only(dtype, method):
    config = config_of(method)
    for grids in (((16, 16),), ((9, 7), (5, 3))):
        layout = lay_out(grids, config)
        x = torch.randn(2, layout.tokens, 64).to(dtype)
        with Recorder() as matching:
            plan = build_plan(x, layout, config)
            assert plan.merged < plan.tokens
        with Recorder() as merging:
            whole = torch.cat((x[:, :4], x), 1)
            plan.unmerge(plan.merge(whole, 4), 4)
        assert set(matching.ops) <= MATCHING, set(matching.ops) - MATCHING
        assert set(merging.ops) <= MERGING_GROUPS, set(merging.ops) - MERGING_GROUPS
        assert not WAITING & (MATCHING | MERGING_GROUPS)


def test_every_allowed_operation_has_a_kernel_on_apples_gpus():
    """Where one is missing, torch raises unless the user lets it run on the CPU."""
    allowed = MATCHING | MERGING_GROUPS | SELECTING | MERGING | KEEPING_DETAIL
    assert allowed <= known_to_mps(), allowed - known_to_mps()
    # Torch has none of this one, a sum over groups that would be at hand.
    assert "_embedding_bag" not in known_to_mps()


@pytest.mark.parametrize("scope", [*SCOPES, *KEEPING])
@pytest.mark.parametrize("host", ["sdxl", "flux"])
def test_a_step_waits_for_the_device_once_and_never_within_a_block(models, host, scope):
    """Against the same call of stock: the noise level is read once, whatever the blocks."""
    direct = Direct(models[host], scope, size=SIZE)

    def extra(**options):
        with Recorder() as recorder:
            direct(**options)
        return recorder.ops

    stock = extra(drop=["wrappers"])
    layouts_and_choice, reused = extra(), extra()
    added = reused - stock
    assert sum(added[name] for name in WAITING) <= 1
    assert {name for name in added if name not in stock} - WAITING <= MERGING | {"arange"}
    # A step that chooses anew may run more, once the tables of a size are made.
    chosen = extra(add={"uuids": ["another condition"]})
    choosing = KEEPING_DETAIL if scope in KEEPING else SELECTING
    assert {name for name in chosen if name not in stock} - WAITING <= choosing
    assert sum((chosen - stock)[name] for name in WAITING) <= 1
    # Tables are made on the host, once per size and run.
    assert sum((layouts_and_choice - stock)[name] for name in WAITING) > 1


@pytest.mark.parametrize(
    ("host", "scope"), matrix(itertools.product(["sdxl", "flux"], SCOPES), every=2)
)
def test_on_another_device_nothing_moves_but_the_tables_of_a_size(host, scope):
    """The model lives on ``meta``: reading a number there, or mixing devices, is an error."""
    config = comfy.supported_models.SDXL(models_config()) if host == "sdxl" else tiny.flux_config()
    config.unet_config["dtype"] = torch.bfloat16
    direct = Direct(_on_meta(config), scope, device="meta", size=SIZE)

    def plain_attention(function, *args, **kwargs):
        """Attention that asks nobody how much memory is free."""
        return attention_pytorch(*args, **kwargs)

    moves = []
    for drop, uuid in ((["wrappers"], "one"), ([], "one"), ([], "one"), ([], "another")):
        add = {"uuids": [uuid], "optimized_attention_override": plain_attention}
        with Recorder() as recorder:
            assert direct(drop=drop, add=add).device.type == "meta"
        moves.append(recorder.moves)
    stock, first, reused, chosen = moves
    assert reused == stock and chosen == stock
    assert set(first[len(stock) :]) == {"_to_copy"}


def with_dtype(host, dtype):
    """A tiny model; fp8 weights compute in bf16, as ComfyUI does with ``weight_dtype fp8``."""
    if host == "flux":
        config = tiny.flux_config()
    else:
        config = comfy.supported_models.SDXL(models_config())
    if dtype == torch.float8_e4m3fn:
        config.manual_cast_dtype = torch.bfloat16
    return tiny.patcher(config, dtype)


def models_config():
    config = dict(small.sdxl().model.model_config.unet_config)
    config.pop("dtype")
    return config


@pytest.mark.parametrize(
    ("host", "scope", "dtype"),
    matrix(
        itertools.product(["sdxl", "flux"], SCOPES, [*DTYPES, torch.float8_e4m3fn]),
        every=2,
    ),
)
def test_every_dtype_of_weights_samples(host, scope, dtype, monkeypatch):
    """Report 61: "sum_cuda not implemented for Float8_e4m3fn"."""
    model = with_dtype(host, dtype)
    applied = set()
    merge = LinearPlan.merge_image

    def watch(self, x):
        applied.add((x.dtype, self.merge_weights.dtype))
        return merge(self, x)

    stock = tiny.sample(model, *SIZE, cfg=3.0)
    monkeypatch.setattr(LinearPlan, "merge_image", watch)
    merged = tiny.sample(attach(model, MergeConfig(scope=scope)), *SIZE, cfg=3.0)
    compute = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    assert applied == {(compute, compute)}
    assert torch.isfinite(merged).all() and merged.dtype == stock.dtype
    assert not torch.equal(stock, merged)
    off = attach(model, MergeConfig(scope=scope, ratio=0))
    assert torch.equal(stock, tiny.sample(off, *SIZE, cfg=3.0))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mask_of_another_dtype_follows_the_tokens(dtype, scope):
    """Report 60: mask in one dtype, query in another: attention refuses."""
    model = tiny.flux(dtype)
    mask = torch.zeros(1, 7 + 48, 7 + 48)
    mask[:, 7:31, :7] = -1e4
    extra = {"attention_mask": mask, "attention_mask_img_shape": (6, 8)}
    positive = tiny.conditioning(model, 1, **extra)
    merged = tiny.sample(attach(model, MergeConfig(scope=scope)), *SIZE, positive=positive)
    assert torch.isfinite(merged).all()
    unmasked = tiny.sample(attach(model, MergeConfig(scope=scope)), *SIZE)
    assert not torch.equal(merged, unmasked)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("host", ["sdxl", "flux"])
def test_a_partly_loaded_model_gives_the_same_image(host, scope, monkeypatch):
    """Low-VRAM mode: most weights stay behind and are cast when used, a LoRA's among them."""
    load = comfy.model_management.LoadedModel.model_load

    def run(partly):
        model = smallest(host)
        patched = attach(neighbours.NEIGHBOURS[host]["LoRA"].patch(model, []), MergeConfig())
        budget = model.model_size() // 3 if partly else 0

        def load_some(self, lowvram_model_memory=0, force_patch_weights=False):
            return load(self, budget, force_patch_weights)

        with monkeypatch.context() as patch:
            patch.setattr(comfy.model_management.LoadedModel, "model_load", load_some)
            image = tiny.sample(patched, *SIZE, cfg=3.0)
        loaded = patched.loaded_size()
        comfy.model_management.unload_all_models()
        return image, loaded, model.model_size()

    whole, loaded, size = run(partly=False)
    assert loaded == size
    part, loaded, size = run(partly=True)
    assert 0 < loaded < size
    assert torch.equal(whole, part)
