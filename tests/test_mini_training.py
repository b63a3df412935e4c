"""What the mini model trains on: scenes, parts of the token grid, weights of a coarser model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import comfy.latent_formats
import numpy
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

# Last, so that no module of ComfyUI is hidden by one of the same name in tools/.
sys.path.append(str(Path(__file__).parent.parent / "tools"))

import mini_training
import train_mini
from mini_checkpoint import save_weights
from mini_flux import FluxShape, MiniFlux, rotary
from mini_pictures import Picture, pixels_of, words_of
from mini_scenes import BACKGROUNDS, SUBJECTS, background
from mini_sheet import decode, encode
from packages import Failed

TOOLS = Path(__file__).parent.parent / "tools"
SMALL = FluxShape(hidden=128, double_blocks=1, single_blocks=1)


def random_model(shape=SMALL):
    """A model whose every weight matters: a new one's last layers are zero."""
    model = MiniFlux(shape).requires_grad_(False)
    for weight in model.parameters():
        weight.add_(0.05 * torch.randn_like(weight))
    mini_training.silence_padding(model, channels=12)
    return model


def test_scenes_are_distinct_and_show_the_subject_in_the_middle(tmp_path):
    file = tmp_path / "red.png"
    Image.new("RGBA", (64, 64), "red").save(file)
    shown = [pixels_of(Picture("red", file, name), 64) for name in BACKGROUNDS]
    for name, pixels in zip(BACKGROUNDS, shown, strict=True):
        ground = torch.from_numpy(background(name, 64)).permute(2, 0, 1) / 127.5 - 1
        assert torch.equal(pixels[:, :9], ground[:, :9])
        assert pixels[:, 32, 32].tolist() == [1, -1, -1]
    assert len({pixels.numpy().tobytes() for pixels in shown}) == len(BACKGROUNDS)
    prompts = {words_of(f"{subject}, {name}") for subject in SUBJECTS for name in BACKGROUNDS}
    assert len(prompts) == len(SUBJECTS) * len(BACKGROUNDS) >= 200


def test_scenes_hold_flat_and_busy_ground():
    steps = {
        name: numpy.abs(numpy.diff(background(name, 64).astype(float), axis=1)).mean()
        for name in BACKGROUNDS
    }
    assert min(steps.values()) < 1 < 20 < max(steps.values())


def test_parts_of_the_grid_keep_their_tokens_and_positions():
    rows, columns, window = 8, 12, 4
    numbers = torch.arange(float(rows * columns)).view(1, 1, rows, columns)
    latent = numbers.repeat_interleave(2, 2).repeat_interleave(2, 3)
    cosine, _ = rotary(3, (range(rows), range(columns)), torch.device("cpu"))
    strides = set()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        grid = mini_training.part_of_grid(rows, columns, window, generator)
        strides.add(tuple(line.step for line in grid))
        tokens = mini_training.take(latent, grid)[0, 0, ::2, ::2].flatten().long()
        assert len(tokens.unique()) == window**2
        part, _ = rotary(3, grid, torch.device("cpu"))
        assert torch.equal(part, torch.cat((cosine[:3], cosine[3:][tokens])))
    assert strides == {(1, 1), (2, 3)}


def test_a_window_of_the_whole_grid_changes_nothing():
    grid = mini_training.part_of_grid(4, 6, 6, torch.Generator())
    assert grid == (range(4), range(6))
    latent = torch.randn(1, 16, 8, 12)
    assert torch.equal(mini_training.take(latent, grid), latent)


def test_halved_tokens_do_what_the_coarser_model_does_to_the_picture_twice_as_large():
    coarse, fine = random_model(), MiniFlux(SMALL)
    fine.load_state_dict(mini_training.halve_tokens(coarse.state_dict()))
    pixels = torch.randn(2, 3, 16, 16)
    context = torch.randn(2, 8, 64)
    rest = (torch.tensor([0.2, 0.8]), context, context.sum(1))
    large = F.interpolate(pixels, scale_factor=2, mode="nearest")
    with torch.no_grad():
        expected = F.avg_pool2d(decode(coarse(encode(large, 2), *rest), 2), 2)
        painted = decode(fine(encode(pixels, 1), *rest), 1)
    assert expected.std() > 0.01
    torch.testing.assert_close(painted, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("patch", [2, 4])
def test_the_demos_node_decodes_what_training_encodes(patch):
    # not by its package, which changes how ComfyUI detects models
    spec = importlib.util.spec_from_file_location("toma_demo_mini", TOOLS / "demo_pack" / "mini.py")
    mini = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mini)
    pixels = torch.rand(2, 3, 32, 32)
    latent = comfy.latent_formats.Flux().process_out(encode(2 * pixels - 1, patch // 2))
    (row,) = mini.ToMADemoDecode().decode({"samples": latent}, patch)
    side_by_side = torch.cat(tuple(pixels.movedim(1, -1)), dim=1)[None]
    torch.testing.assert_close(row, side_by_side, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--window", "-1"], "--window must be at least 0, got -1"),
        (["--scenes", "--images", "there"], "leave out --images, or --scenes"),
    ],
)
def test_wrong_options_are_refused_with_the_remedy(options, told, capsys):
    with pytest.raises(SystemExit):
        train_mini.parse(options)
    assert told in capsys.readouterr().err


def test_a_start_of_finer_tokens_is_refused_with_the_remedy(tmp_path):
    file, picture = tmp_path / "fine.safetensors", tmp_path / "pictures" / "red.png"
    save_weights(file, MiniFlux(SMALL), {"patch": "2"})
    picture.parent.mkdir()
    Image.new("RGB", (16, 16), "red").save(picture)
    where = ["--images", str(picture.parent), "--out", str(tmp_path / "out"), "--size", "16"]
    with pytest.raises(Failed, match="got one of 2: use --patch 2"):
        train_mini.Run(train_mini.parse([*where, "--start", str(file)]))
