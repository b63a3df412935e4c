"""`python tools quality`: its measures on known inputs, its settings, and a small run of all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from comfyui_toma.toma_core.config import MergeConfig
from comfyui_toma.toma_core.plan import Moment, Place
from comfyui_toma.toma_core.regions import build_layout
from PIL import Image

# Last, so that no module of ComfyUI is hidden by one of the same name in tools/.
sys.path.append(str(Path(__file__).parent.parent / "tools"))

import quality  # noqa: E402
from mini_host import MiniModel  # noqa: E402
from packages import Failed  # noqa: E402
from quality_measures import EQUAL_DB, psnr, ssim  # noqa: E402
from quality_plot import front  # noqa: E402

COLUMNS = ["steps", "group", "setting", "flops", "time", "psnr", "worst", "ssim", "features"]


@pytest.fixture
def grey():
    return torch.full((2, 3, 32, 32), 0.5)


def test_equal_pictures_are_equal_by_every_measure(grey):
    noisy = grey + 0.1 * torch.randn(grey.shape)
    assert psnr(noisy, noisy).tolist() == [EQUAL_DB] * 2
    assert ssim(noisy, noisy).tolist() == pytest.approx([1, 1])


def test_psnr_of_a_known_error(grey):
    other = grey.clone()
    other[0] += 0.1  # mean squared error 0.01
    other[1] += 0.01
    assert psnr(grey, other).tolist() == pytest.approx([20, 40], abs=1e-3)


def test_ssim_falls_with_noise(grey):
    busy = torch.rand(grey.shape)
    noise = torch.randn(grey.shape)
    values = [float(ssim(busy, busy + size * noise).mean()) for size in (0.05, 0.2, 0.8)]
    assert 1 > values[0] > values[1] > values[2] > 0


def test_the_front_holds_what_no_cheaper_point_equals():
    points = [(0.9, 30), (0.5, 20), (0.7, 19), (0.5, 18), (0.6, 25), (1.0, 30)]
    assert front(points) == [(0.5, 20), (0.6, 25), (0.9, 30)]


def test_a_small_run_leaves_rows_plot_and_sheets(tmp_path, capsys):
    out, rows = tmp_path / "out", tmp_path / "rows.json"
    pattern = "^ToMA: ratio 0$|^ToMA: ratio 0.5$|1/2 of the steps|tried: by outputs"
    arguments = ["--images", "2", "--steps", "6", "--only", pattern, "--threads", "1"]
    assert quality.main([*arguments, "--out", str(out), "--json", str(rows)]) == 0
    found = json.loads(rows.read_text())["rows"]
    assert [list(row) for row in found] == [COLUMNS] * 4
    stock, merged, fewer, tried = found
    names = ["ratio 0", "ratio 0.5", "1/2 of the steps", "by outputs"]
    assert [row["setting"] for row in found] == names
    assert (stock["psnr"], stock["ssim"], stock["flops"]) == (EQUAL_DB, 1, 1)
    assert merged["psnr"] < EQUAL_DB and merged["flops"] < 1 and merged["features"] > 0
    assert fewer["flops"] == pytest.approx(0.5) and tried["flops"] < 1
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[2] for line in table[2:]] == [row["setting"] for row in found]
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {
        "quality-6-steps.png", "sheet-6-steps-toma.png", "sheet-6-steps-fewer-steps.png",
        "sheet-6-steps-tried.png",
    }  # fmt: skip
    for name in pictures:
        assert len(Image.open(out / name).convert("L").getcolors()) > 2


def test_settings_have_names_of_their_own():
    from quality_rows import rows

    names = [(row.group, row.name) for row in rows()]
    assert len(set(names)) == len(names)


def grid_16(**changes):
    config = MergeConfig(tile_size=8, keep_detail=True, **changes)
    return config, build_layout(((16, 16),), config)


def test_a_budget_spends_all_destinations_and_most_where_tokens_differ():
    from quality_trials import budget

    config, layout = grid_16(ratio=0.75)
    x = torch.ones(2, layout.tokens, 32)
    busy = layout.index[0]
    x[0, busy] = torch.randn(len(busy), 32)
    plan = budget(x, layout, config, Moment(Place(), 0))
    kept = plan.positions()
    assert plan.merged == layout.merged == 64 and all(len(set(row.tolist())) == 64 for row in kept)
    assert torch.isin(kept[0], busy).sum() == 24  # half more than the share of 16
    assert torch.equal(plan.merge_image(x), x.take_along_dim(kept[..., None], 1))
    # destinations come back as they were, and constant tokens too
    assert torch.allclose(plan.unmerge_image(plan.merge_image(x))[1], x[1])
    assert torch.equal(plan.joined([plan]).positions(), torch.cat([kept, kept]))


def test_shifted_tiles_move_their_edges_and_keep_as_many_tokens():
    from quality_trials import shifted

    config, layout = grid_16(ratio=0.75)
    moved = shifted(layout.grids, config, 4, torch.device("cpu"))
    assert (layout.regions, moved.regions) == (4, 9) and moved.merged == layout.merged
    x = torch.randn(1, layout.tokens, 2)
    assert torch.equal(moved.join(moved.split(x)), x)
    assert [int(n) for n in moved.valid.sum(1)] == [16, 32, 16, 32, 64, 32, 16, 32, 16]


def test_nothing_of_a_trial_stays():
    from comfyui_toma.nodes.run import Site
    from comfyui_toma.toma_core import planning
    from comfyui_toma.toma_core.detail import Carry
    from quality_rows import rows

    mini = MiniModel()
    places = (Site._make, Site.carry, Carry.give, dict(planning._WAYS))
    for row in rows():
        if row.group == "tried":
            mini.sample(row.patch(mini.model), mini.names[:1], [1], 1)
    assert (Site._make, Site.carry, Carry.give, planning._WAYS) == places


@pytest.mark.parametrize("option", [("--images", "0"), ("--steps", "-1"), ("--only", "(")])
def test_a_wrong_option_is_named(option, capsys):
    with pytest.raises(SystemExit):
        quality.parse(list(option))
    assert f"argument {option[0]}: must be" in capsys.readouterr().err


def test_a_pattern_without_a_setting_lists_the_settings(tmp_path):
    with pytest.raises(
        Failed, match="--only must match a setting, got nothing(.|\n)*ToMA: ratio 0.5"
    ):
        quality.main(["--only", "nothing", "--out", str(tmp_path)])
