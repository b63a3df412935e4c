"""K8: what a node does is what it says, and it says when it does nothing."""

from __future__ import annotations

import itertools
import logging
import re

import comfy.supported_models
import probe
import pytest
import small
import tiny
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.run import SamplingRun
from comfyui_toma.nodes.unet import UNetBlocks
from comfyui_toma.toma_core.config import MergeConfig
from comfyui_toma.toma_core.regions import build_layout
from direct import Direct
from matrix import matrix
from merging import KEEPING, SCOPES, WAYS, config_of
from torch.utils.flop_counter import FlopCounterMode

SIZE = (16, 24)
TEXT = 7


@pytest.fixture(scope="module")
def models():
    return {name: make() for name, make in small.MODELS.items()}


def lines(caplog):
    """What our logger wrote: level and text."""
    return [
        (record.levelno, record.getMessage()) for record in caplog.records if record.name == "toma"
    ]


@pytest.fixture(autouse=True)
def everything_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="toma")


RATIOS = [0.1, 0.3, 0.5, 0.75, 0.9]


@pytest.mark.parametrize(
    ("name", "scope", "ratio"), matrix(itertools.product(small.MODELS, SCOPES, RATIOS), every=4)
)
def test_the_log_tells_the_tokens_that_a_spy_counts(models, caplog, name, scope, ratio):
    """Reports 66 and 69: ratio 0 and 0.9 give one image; 0.9 is silently held at 0.75."""
    model = models[name]
    with probe.token_spy(model) as stock:
        tiny.sample(model, *SIZE, cfg=1.0)
    with probe.token_spy(model) as merged:
        tiny.sample(attach(model, MergeConfig(ratio=ratio, scope=scope)), *SIZE, cfg=1.0)
    counted = {}
    for part, counts in stock.items():
        block, kind = part.rsplit(".", 1)
        text = TEXT if "single" in block else 0
        pairs = {(b - text, a - text) for b, a in zip(counts, merged[part], strict=True)}
        if scope == "attention" and name != "flux":
            expected_whole = kind != "attn1"
        else:
            expected_whole = scope == "attention"
        [(before, after)] = pairs
        assert (before == after) == expected_whole, part
        if not expected_whole:
            counted[block] = (before, after)
    if name == "flux" and scope == "attention":
        # Only the attention product itself works on fewer tokens: no module to spy on.
        rows, columns = SIZE[0] // 2, SIZE[1] // 2
        layout = build_layout(((rows, columns),), MergeConfig(ratio=ratio))
        counted = {f"block {i}": (rows * columns, layout.merged) for i in range(5)}
    for before, after in counted.values():
        # Each region rounds by itself, by half a token at most.
        assert abs(after - before * (1 - ratio)) <= max(0.5, before / 16)
    [(level, text)] = lines(caplog)
    assert level == logging.INFO
    told = [tuple(map(int, found)) for found in re.findall(r"(\d+) -> (\d+) tokens in (\d+)", text)]
    expected = {}
    for pair in counted.values():
        expected[pair] = expected.get(pair, 0) + 1
    assert {(before, after): blocks for before, after, blocks in told} == expected


def flops(model, config, latent, batch=1):
    """FLOP of a call that reuses its choice, our own work included, counted without memory."""

    def countable(function, *args, **kwargs):
        return attention_pytorch(*args, **kwargs)

    direct = Direct(
        *(model, config.scope.value),
        **{"ratio": config.ratio, "tile_size": config.tile_size},
        **{"device": "meta", "size": latent, "batch": batch},
    )
    options = {"optimized_attention_override": countable}
    direct(add=options)
    counter = FlopCounterMode(display=False)
    with counter:
        direct(add=options)
    return counter.get_total_flops()


def on_meta(name):
    """Few blocks of the width of the real models, shapes only."""
    if name == "flux":
        config = tiny.flux_config(hidden_size=3072, num_heads=24, depth=1, depth_single_blocks=1)
    else:
        kind = comfy.supported_models.SDXL if name == "sdxl" else comfy.supported_models.SD15
        config = dict(small.MODELS[name]().model.model_config.unet_config)
        config.pop("dtype")
        config = kind({**config, "model_channels": 320})
    config.unet_config["dtype"] = torch.bfloat16
    return probe._on_meta(config)


@pytest.mark.parametrize(
    ("name", "scope"), matrix(itertools.product(small.MODELS, SCOPES), every=3)
)
def test_work_falls_with_every_step_of_the_ratio(name, scope):
    """Report 67: no gain, or slower. 256 x 256 pixels."""
    model = on_meta(name)
    ratios = [0, 0.1, 0.5, 0.9]
    counted = [
        flops(model, MergeConfig(ratio=ratio, scope=scope, tile_size=4), (32, 32))
        for ratio in ratios
    ]
    assert all(more > less for more, less in itertools.pairwise(counted)), counted


def test_sd15_at_1024_pixels_and_batch_4_gains_long_before_90_percent():
    """Report 65: 1024 x 1024 pixels, batch 4, SD 1.5: no gain until 90 percent."""
    model = on_meta("sd15")
    stock = flops(model, MergeConfig(ratio=0), (128, 128), batch=4)
    merged = flops(model, MergeConfig(ratio=0.5), (128, 128), batch=4)
    assert merged < 0.6 * stock, merged / stock


RANGES = [(0.0, 0.5), (0.4, 1.0), (0.25, 0.75)]


@pytest.mark.parametrize(
    ("name", "way", "start", "end"),
    matrix([(n, w, *r) for n in small.MODELS for w in WAYS for r in RANGES], every=5),
)
def test_start_and_end_decide_which_steps_merge(models, name, way, start, end, monkeypatch):
    """Report 70: ``start_step`` is ignored."""
    model = models[name]
    sampling = model.get_model_object("model_sampling")
    patched = attach(model, config_of(way, start_percent=start, end_percent=end))
    high = float("inf") if start == 0 else sampling.percent_to_sigma(start)
    low = -1.0 if end == 1 else sampling.percent_to_sigma(end)
    sigmas, worked = [], []
    apply_model = SamplingRun.apply_model

    def watch(self, executor, *args, **kwargs):
        options = kwargs.get("transformer_options") or args[5]
        sigmas.append(float(options["sigmas"][0]))
        for run in self._runs:
            run.report._merged.clear()
        result = apply_model(self, executor, *args, **kwargs)
        # Blocks that merge, or run whole for the sake of those steps that do.
        worked.append(sum(len(run.report._merged) for run in self._runs) > 0)
        return result

    monkeypatch.setattr(SamplingRun, "apply_model", watch)
    tiny.sample(patched, 8, 16, cfg=1.0, steps=6)
    expected = [low < sigma <= high for sigma in sigmas]
    expected[-1] &= way not in KEEPING  # it spares the last step
    if way == "CA-ToMe":
        expected[expected.index(True)] = False  # what it finds serves from the next step on
    assert worked == expected
    assert 0 < sum(worked) < 6


NOTHING = {
    "tiles of one token": ({"tile_size": 1}, SIZE, "too few tokens"),
    "a ratio below half a token": ({"ratio": 0.05, "tile_size": 2}, SIZE, "too few tokens"),
    "a picture of one token": ({}, (2, 2), "too few tokens"),
    "a range between two steps": (
        {"start_percent": 0.98, "end_percent": 0.99},
        SIZE,
        "no sampling step",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_node_that_does_nothing_warns_once_and_gives_stock(models, caplog, case):
    settings, size, reason = NOTHING[case]
    model = models["flux"]
    patched = attach(model, MergeConfig(**settings))
    stock = tiny.sample(model, *size)
    assert torch.equal(stock, tiny.sample(patched, *size))
    [(level, text)] = lines(caplog)
    assert level == logging.WARNING and "Inactive" in text and reason in text


def test_levels_that_are_left_out_are_not_counted_and_leave_no_warning(models, caplog):
    blocks = UNetBlocks(max_downsample=2, middle_block=False)
    tiny.sample(attach(models["sdxl"], MergeConfig(), blocks), *SIZE)
    [(level, text)] = lines(caplog)
    # 8 x 12 tokens at half size; the level below and the middle stay whole.
    assert level == logging.INFO and re.search(r"96 -> 48 tokens in 3 blocks", text)
    assert text.count("->") == 1


def test_every_run_reports_by_itself(models, caplog):
    model = attach(models["flux"], MergeConfig())
    for size in ((16, 16), (16, 24), (16, 16)):
        tiny.sample(model, *size)
    texts = [text for _, text in lines(caplog)]
    assert len(texts) == 3
    assert ["96 -> 48" in text for text in texts] == [False, True, False]
    assert ["64 -> 32" in text for text in texts] == [True, False, True]
