"""The benchmarks at tiny size: the shape of their rows, and that they count what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import comfy.cli_args
import pytest
import torch

# Last, so that no module of ComfyUI is hidden by one of the same name in tools/.
sys.path.append(str(Path(__file__).parent.parent / "tools"))

import bench  # noqa: E402
import bench_scale  # noqa: E402
from bench_clock import Clock, SpanTimer, peak_mib  # noqa: E402
from bench_measure import own_work, steps_of, typical_steps  # noqa: E402
from bench_models import Shape, build, make_work  # noqa: E402
from comfyui_toma.nodes.attach import attach  # noqa: E402
from comfyui_toma.toma_core.config import Matching, MergeConfig  # noqa: E402

ROW = [
    "model", "size", "batch", "scope", "ratio", "seconds", "stock_seconds", "speedup", "tflop",
    "bound", "efficiency", "own_share", "peak_mib",
]  # fmt: skip
TINY_FLUX = Shape("flux", tiny=True, double=2, single=3)


def run(tmp_path, *arguments):
    path = tmp_path / "rows.json"
    assert bench.main([*arguments, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert list(written) == ["machine", "rows"] and "bf16" in written["machine"]
    return written["rows"]


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_rows_have_the_promised_shape(tmp_path, kind):
    rows = run(tmp_path, kind, "--tiny", "--sizes", "256", "--rounds", "1", "--ratios", "0", "0.5")
    assert [list(row) for row in rows] == [ROW, ROW]
    stock, merged = rows
    assert (stock["ratio"], stock["bound"], stock["own_share"]) == (0, 1, 0)
    assert merged["bound"] > 1
    assert merged["bound"] == pytest.approx(stock["tflop"] / merged["tflop"], rel=1e-3)
    assert merged["speedup"] == pytest.approx(merged["stock_seconds"] / merged["seconds"], rel=1e-3)
    assert merged["efficiency"] == pytest.approx(merged["speedup"] / merged["bound"], rel=1e-3)
    assert merged["own_share"] > 0 and merged["peak_mib"] > 0


def test_compiled_stock_against_compiled_toma(tmp_path, monkeypatch):
    monkeypatch.setattr(comfy.cli_args.args, "use_pytorch_cross_attention", False)  # put back then
    sizes = ("--sizes", "256", "--rounds", "1", "--ratios", "0.5")
    (row,) = run(tmp_path, "flux", "--tiny", "--double", "1", "--single", "1", *sizes, "--compile")
    assert list(row) == [*ROW, "note"] and row["note"] == "compiled"
    assert row["bound"] > 1 and row["own_share"] is None


def test_peers_are_measured_by_the_same_row_and_their_error(tmp_path):
    # The length of CA-ToMe's sequences depends on the tokens themselves.
    names = ("ToMA", "CA-ToMe", "ComfyUI ToMe")
    rows = run(tmp_path, "peers", "--tiny", "--sizes", "256", "--rounds", "1", "--only", *names)
    assert [list(row) for row in rows] == [[*ROW, "method", "error"]] * 3
    # ComfyUI's node merges only at the latent's own size, at which SDXL has no attention.
    assert rows[0]["error"] > 0 and rows[1]["bound"] > 0 and rows[2]["error"] == 0


def test_the_gpu_script_runs_dry(tmp_path):
    rows = run(tmp_path, "gpu", "--dry-run", "--models", "flux", "--sizes", "256", "--batches", "2")
    assert list(rows[0])[: len(ROW)] == ROW
    assert 0 < rows[0]["own_kernels"] < rows[0]["stock_kernels"]


def test_scale_has_a_row_per_region_and_size(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_scale, "ROOT", tmp_path)  # no small model there
    rows = run(tmp_path, "scale", "--tiny", "--sizes", "128", "256", "--batches", "1")
    assert [(row["region"], row["tokens"]) for row in rows] == [
        (region, tokens) for region in ("tile", "stripe", "global") for tokens in (64, 256)
    ]


def test_global_selection_loses_less_than_two_percent_on_a_trained_model():
    paths = list((bench_scale.ROOT / "tools" / "mini").glob("*.safetensors"))
    assert paths
    for path in paths:
        row = bench_scale.loss_row(path, 256, 0.5)["row"]
        assert 0 <= row["loss"] < 0.02
        assert row["loss"] < row["random"]


def test_an_interval_has_its_kinds_of_steps_in_true_proportion():
    assert typical_steps(MergeConfig(reuse_interval=5, weight_interval=1)) == {0: 0.2, 1: 0.8}
    assert typical_steps(MergeConfig(reuse_interval=6, weight_interval=3)) == pytest.approx(
        {0: 1 / 6, 1: 4 / 6, 3: 1 / 6}
    )
    assert typical_steps(MergeConfig(ratio=0)) == {0: 1.0}
    # Of CA-ToMe the second interval, as its first call merges nothing.
    ca_tome = MergeConfig(scope="attention", reuse_interval=3, matching=Matching())
    assert typical_steps(ca_tome) == pytest.approx({3: 1 / 3, 4: 2 / 3})


def test_own_work_sees_each_kind_of_step():
    work = make_work(TINY_FLUX, build(TINY_FLUX, "cpu"), 128, 2)
    config = MergeConfig(reuse_interval=6, weight_interval=3)
    seen = []
    with steps_of(work, attach(work.model, config), config) as step, own_work(Clock()) as timer:
        for number in (0, 1, 3):
            timer.spans.clear()
            step(number)
            seen.append(set(timer.seconds()))
    reuse = {"merge", "unmerge"}
    assert seen == [{*reuse, "selection", "weights"}, reuse, {*reuse, "weights"}]


def test_time_in_a_nested_span_is_counted_once():
    class Ticks(Clock):
        now = 0

        def mark(self):
            self.now += 1
            return self.now

    timer = SpanTimer(Ticks())
    inner = timer.wrap("inner", lambda: None)
    timer.wrap("outer", lambda: (inner(), inner()))()
    # Ticks at 1 (2 3) (4 5) 6.
    assert timer.seconds() == {"inner": 2, "outer": 3}


def test_peak_memory_is_what_tensors_hold_at_once():
    work = make_work(TINY_FLUX, build(TINY_FLUX, "cpu"), 128, 1)

    def three_megabytes_at_most():
        for _ in range(5):
            a = torch.zeros(2**20, dtype=torch.uint8)
            b = torch.zeros(2**21, dtype=torch.uint8)
            del a, b

    weights, _ = peak_mib(lambda: None, work)
    peak, _ = peak_mib(three_megabytes_at_most, work)
    assert peak == pytest.approx(weights + 3, abs=0.01)


def test_presets_save_more_from_one_to_the_next_and_in_longer_runs(tmp_path):
    rows = run(tmp_path, "presets", "--tiny", "--sizes", "256", "--steps", "2", "4", "20")
    for model in ("sdxl", "flux"):
        bounds = {
            (row["setting"], row["steps"]): row["bound"] for row in rows if row["model"] == model
        }
        for preset in ("quality", "balanced", "fast"):
            # Two steps: one chooses and runs whole, and the last one is spared.
            assert bounds[preset, 2] == pytest.approx(1, rel=0.02)
            assert bounds[preset, 2] < bounds[preset, 4] <= bounds[preset, 20]
        assert bounds["quality", 20] < bounds["balanced", 20] < bounds["fast", 20]
