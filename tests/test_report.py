"""What a run says: in the log, and on the node."""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace

import pytest
import tiny
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.options import KEY
from comfyui_toma.nodes.report import Report, Step
from comfyui_toma.toma_core.config import MergeConfig
from neighbours import run_node

HYPER_TILE = {"tile_size": 128, "swap_size": 2, "max_depth": 2, "scale_depth": False}
DEEP_SHRINK = {
    **{"block_number": 3, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 1.0},
    **{"downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic"},
}


@pytest.fixture
def shown(monkeypatch):
    """Texts that reach nodes, through the interface of ComfyUI's server with a client."""
    texts = []

    def send_progress_text(text, node_id, sid=None):
        texts.append((node_id, text, sid))

    instance = SimpleNamespace(client_id="client", send_progress_text=send_progress_text)
    server = SimpleNamespace(PromptServer=SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, "server", server)
    return SimpleNamespace(texts=texts, instance=instance)


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "toma"]


def last_line(caplog):
    return lines_of(caplog)[-1]


def test_names_model_size_tokens_blocks_and_speed(caplog, shown):
    model = tiny.sdxl()
    with caplog.at_level(logging.INFO):
        tiny.sample(attach(model, MergeConfig(), node_id="7:3"), 32, 48, steps=4)
    line = (
        r"SDXL 384x256: 96 -> 48 tokens in \d+ blocks, 384 -> 192 tokens in \d+ blocks, "
        r"1\.\d\dx fewer FLOPs, \d+\.\d\d s/step$"
    )
    assert re.fullmatch("ToMA: " + line, last_line(caplog))
    assert len(shown.texts) == 5  # after each step, and at the end
    node_id, text, client = shown.texts[-1]
    assert re.fullmatch(line, text) and node_id == "7:3" and client == "client"


def test_seconds_are_the_mean_beside_those_of_steps_on_all_tokens():
    report = Report("SDXL 1024x1024")
    report.merged("block", 4096, 2048)
    for seconds, kind in (
        *((9.0, Step.WHOLE), (1.0, Step.MERGED)),  # warms up
        *((4.0, Step.WHOLE), (1.0, Step.MERGED), (6.0, Step.WHOLE), (3.0, Step.MERGED)),
    ):
        report.step(seconds, kind)
    line = "SDXL 1024x1024: 4096 -> 2048 tokens in 1 block"
    assert report.summary() == f"{line}, 4.00 s/step (whole steps 5.00)"
    report.step(11.0, Step.STOCK)
    assert report.summary() == f"{line}, 5.00 s/step (stock 11.00)"


@pytest.mark.parametrize("changes", [{"end_percent": 0.9}, {"keep_detail": True}])
def test_every_step_is_timed_also_the_last(caplog, monkeypatch, changes):
    steps = []
    monkeypatch.setattr(Report, "step", lambda self, seconds, kind: steps.append(kind))
    tiny.sample(attach(tiny.sdxl(), MergeConfig(reuse_interval=2, **changes)), 32, 32, steps=6)
    pair = [Step.WHOLE if "keep_detail" in changes else Step.MERGED, Step.MERGED]
    assert steps == [*(3 * pair)[:5], Step.STOCK]


def test_a_step_that_another_node_merged_is_not_called_stock(monkeypatch):
    steps = []
    monkeypatch.setattr(Report, "step", lambda self, _, kind: steps.append((id(self), kind)))
    model = attach(tiny.sdxl(), MergeConfig(end_percent=0.5))
    tiny.sample(attach(model, MergeConfig(start_percent=0.5)), 32, 32, steps=6)
    assert len(steps) == 6 and len({report for report, _ in steps}) == 2
    assert {kind for _, kind in steps} == {Step.MERGED}


def test_says_at_a_whole_step_that_the_next_ones_merge(shown):
    tiny.sample(
        attach(tiny.sdxl(), MergeConfig(keep_detail=True, reuse_interval=3), node_id="1"), 32, 32
    )
    texts = [text for _, text, _ in shown.texts]
    assert "this step runs whole, so that detail is kept; the next ones merge" in texts[0]
    assert not any("Inactive" in text for text in texts) and "MiB of detail kept" in texts[-1]


@pytest.mark.parametrize(
    ("module", "node", "inputs"),
    [
        ("nodes_hypertile", "HyperTile", HYPER_TILE),
        ("nodes_model_downscale", "PatchModelAddDownscale", DEEP_SHRINK),
    ],
)
def test_flops_are_said_only_where_no_other_node_changes_them(caplog, module, node, inputs):
    lines = []
    for others in (False, True):
        model = attach(tiny.sdxl(), MergeConfig())
        with caplog.at_level(logging.INFO):
            tiny.sample(run_node(module, node, model=model, **inputs) if others else model, 64, 64)
        lines += [line for line in lines_of(caplog) if " tokens in " in line]
        caplog.clear()
    assert ["fewer FLOPs" in line for line in lines] == [True, False]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"tile_size": 1}, "too few tokens to merge"),
        (
            {"start_percent": 0.98, "end_percent": 0.99},
            "no sampling step lies in the chosen range",
        ),
        (
            {"keep_detail": True, "end_percent": 0.4},
            "with keep_detail, every step that this run computed stays whole",
        ),
    ],
)
def test_says_once_why_nothing_merged(caplog, shown, config, reason):
    tiny.sample(attach(tiny.sdxl(), MergeConfig(**config), node_id="1"), 16, 16)
    assert lines_of(caplog) == [f"ToMA: Inactive on SDXL 128x128: {reason}."]
    assert shown.texts[-1][1] == f"Inactive on SDXL 128x128: {reason}."


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"ratio": 0}, "ratio is 0"),
        (
            {"keep_detail": True, "reuse_interval": 1},
            "with keep_detail, reuse_interval 1 leaves every step whole",
        ),
    ],
)
def test_a_node_that_is_off_says_so_and_that_others_are_not(shown, config, reason):
    model = attach(tiny.sdxl(), MergeConfig(**config), node_id="4")
    assert "transformer_options" not in model.model_options or not any(
        KEY in str(key) for key in model.model_options["transformer_options"]
    )
    attach(attach(tiny.sdxl(), MergeConfig()), MergeConfig(**config), node_id="5")
    assert [text for _, text, _ in shown.texts] == [
        f"Inactive: {reason}.",
        f"Inactive: {reason}. A node before this one still merges.",
    ]


def test_says_nothing_of_a_run_that_failed_before_it_merged(caplog, shown):
    model = attach(tiny.sdxl(), MergeConfig(), node_id="1")

    def fail(*_, **__):
        raise RuntimeError("of another node")

    model.set_model_unet_function_wrapper(fail)
    with pytest.raises(RuntimeError, match="of another node"):
        tiny.sample(model, 32, 32)
    assert lines_of(caplog) == [] and shown.texts == []


def test_silent_without_a_client(shown):
    shown.instance.client_id = None
    tiny.sample(attach(tiny.sdxl(), MergeConfig(), node_id="1"), 16, 16)
    assert shown.texts == []
