"""What a run says: in the log, and on the node."""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace

import pytest
import tiny
from comfyui_toma.nodes.attach import attach
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


def test_stock_seconds_only_where_steps_ran_unmerged(caplog):
    model = tiny.sdxl()
    with caplog.at_level(logging.INFO):
        tiny.sample(attach(model, MergeConfig(end_percent=0.5)), 32, 32, steps=6)
    assert re.search(r"\d s/step \(stock \d+\.\d\d\)$", last_line(caplog))


def test_seconds_are_the_mean_so_that_no_whole_step_is_hidden():
    report = Report("SDXL 1024x1024")
    report.merged("block", 4096, 2048)
    for seconds, kind in (
        *((9.0, Step.WHOLE), (1.0, Step.MERGED)),  # warms up
        *((4.0, Step.WHOLE), (1.0, Step.MERGED), (6.0, Step.WHOLE), (3.0, Step.MERGED)),
    ):
        report.step(seconds, kind)
    line = "SDXL 1024x1024: 4096 -> 2048 tokens in 1 block, 4.00 s/step"
    assert report.summary() == f"{line} (whole steps 5.00)"
    report.step(7.0, Step.STOCK)
    assert report.summary() == f"{line} (stock 7.00)"


def test_seconds_stand_beside_those_of_the_whole_steps(caplog):
    model = tiny.sdxl()
    with caplog.at_level(logging.INFO):
        tiny.sample(attach(model, MergeConfig(keep_detail=True, reuse_interval=2)), 32, 32, steps=6)
    assert re.search(r"s/step \(whole steps \d+\.\d\d\), \d+ MiB of detail kept$", last_line(caplog))


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
    ],
)
def test_says_once_why_nothing_merged(caplog, shown, config, reason):
    tiny.sample(attach(tiny.sdxl(), MergeConfig(**config), node_id="1"), 16, 16)
    assert lines_of(caplog) == [f"ToMA: Inactive on SDXL 128x128: {reason}."]
    assert shown.texts[-1][1] == f"Inactive on SDXL 128x128: {reason}."


def test_ratio_zero_says_so_on_the_node(shown):
    attach(tiny.sdxl(), MergeConfig(ratio=0), node_id="4")
    assert [text for _, text, _ in shown.texts] == ["Inactive: ratio is 0."]


def test_silent_without_a_client(shown):
    shown.instance.client_id = None
    tiny.sample(attach(tiny.sdxl(), MergeConfig(), node_id="1"), 16, 16)
    assert shown.texts == []
