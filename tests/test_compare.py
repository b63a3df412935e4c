"""The node "ToMA: Compare": its runs are KSampler's, and it leaves nothing behind."""

from __future__ import annotations

import comfy.model_management
import comfy.utils
import pytest
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.compare import REFERENCE_NOTE, ToMABenchmark, read_ratios
from comfyui_toma.toma_core.config import MergeConfig

PATTERN = {"tile_size": 4, "reuse_interval": 2, "keep_detail": False}
STEPS = 3


def sampling(model, batch=1):
    size = {"samples": torch.zeros_like(tiny.noise_for(model, 24, 32, batch))}
    return {
        "positive": tiny.conditioning(model, 1),
        "negative": tiny.conditioning(model, 2),
        "latent_image": size,
        "seed": 5,
        "steps": STEPS,
        "cfg": 3.0,
        "sampler_name": "euler",
        "scheduler": "normal",
        "denoise": 1.0,
    }


def compare(model, ratios, **changes):
    return ToMABenchmark.execute(model, ratios, **{**sampling(model), **PATTERN, **changes})


def k_sampler(model, batch=1):
    import nodes

    return nodes.KSampler().sample(model, **sampling(model, batch))[0]["samples"]


@pytest.mark.parametrize("make", [tiny.sdxl, tiny.flux])
def test_every_run_is_what_k_sampler_makes(make):
    model = make()
    size = sampling(model, batch=2)["latent_image"]
    batch = compare(model, "0.5, 0, 0.25", latent_image=size)[0]["samples"]
    for ratio, latents in zip((0.5, 0, 0.25), batch.split(2), strict=True):
        merging = attach(model, MergeConfig(ratio=ratio, **PATTERN))
        assert torch.equal(latents, k_sampler(merging, batch=2)), ratio
    assert torch.equal(batch[2:4], k_sampler(model, batch=2))


def test_table_and_plot():
    batch, table, plot = compare(tiny.sdxl(), "0, 0.25, 0.75").result
    heading, *rows = (line.split() for line in table.splitlines())
    assert heading == ["ratio", "seconds", "speed-up", "difference"]
    assert [float(row[0]) for row in rows] == [0, 0.25, 0.75]
    assert rows[0][2:] == ["1.00x", "0.0", "%"]
    assert all(float(row[1]) >= 0 and float(row[2].rstrip("x")) > 0 for row in rows)
    stock = batch["samples"][0]
    for row, latents in zip(rows, batch["samples"], strict=True):
        change = (latents - stock).square().mean().sqrt() / stock.std(correction=0)
        assert float(row[3]) == pytest.approx(100 * float(change), abs=0.05)
    assert plot.shape == (1, 512, 768, 3)
    assert 0 <= plot.min() < plot.max() <= 1


def test_without_ratio_zero_the_reference_runs_first_and_the_table_says_so():
    model = tiny.sdxl()
    batch, table, _ = compare(model, "0.5").result
    assert table.splitlines()[-1] == REFERENCE_NOTE and table.split()[4] == "0"
    assert torch.equal(batch["samples"][:1], k_sampler(model))


@pytest.mark.parametrize("text", ["", "a", "0, ", "0; 0.5", "0.95", "-0.1", "nan", "50 %"])
def test_a_bad_list_shows_a_good_one(text):
    with pytest.raises(ValueError, match=r"from 0 to 0\.9 with commas.*got .*0, 0\.25, 0\.5"):
        read_ratios(text)


def test_a_model_that_merges_already_is_refused():
    with pytest.raises(ValueError, match="already merges.*before the ToMA node"):
        compare(attach(tiny.sdxl(), MergeConfig()), "0, 0.5")


@pytest.fixture
def bar(monkeypatch):
    """Stands in for ComfyUI's progress bars, which let no more than a few values a second through.

    Its ``at`` is where somebody interrupts.
    """

    class Bar:
        values: list[tuple[int, int]] = []
        at = -1

        def __init__(self, total, node_id=None):
            self.total = total

        def update_absolute(self, value, total=None, preview=None):
            self.values.append((value, self.total))
            if value == self.at:
                comfy.model_management.interrupt_current_processing()

    monkeypatch.setattr(comfy.utils, "ProgressBar", Bar)
    return Bar


def test_one_bar_covers_all_runs(bar):
    compare(tiny.sdxl(), "0, 0.5")
    total = 1 + 2 * STEPS
    assert bar.values == [(step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize("at", [1, 1 + STEPS, 2 + STEPS])
def test_an_abort_stops_at_once_and_leaves_nothing(bar, at):
    model = tiny.sdxl()
    stock = k_sampler(model)
    bar.values.clear()
    bar.at = at
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        compare(model, "0, 0.5")
    assert [value for value, _ in bar.values] == list(range(1, at + 1))
    bar.at = -1
    assert not any(model.wrappers.values())
    assert "toma" not in model.model_options["transformer_options"]
    assert torch.equal(compare(model, "0, 0.5")[0]["samples"][:1], stock)
    assert torch.equal(k_sampler(model), stock)
