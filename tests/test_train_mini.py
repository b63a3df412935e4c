"""`python tools train-mini` from the outside: it trains, stops, and goes on where it stopped."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

TOOLS = Path(__file__).resolve().parent.parent / "tools"
TRAIN = TOOLS / "train_mini.py"
SHIPPED = TOOLS / "mini" / "mini-flux-scenes.safetensors"


def train(folder, out, *options):
    for name, colour in (("red square", "red"), ("blue square", "blue")):
        Image.new("RGB", (16, 16), colour).save(folder / f"{name}.png")
    command = [sys.executable, TRAIN, "--images", folder, "--out", out, "--size", 16, "--batch", 2]
    command += ["--threads", 1, "--sheet", 1, "--precision", "fp32", *options]
    finished = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if finished.returncode:
        raise AssertionError(finished.stdout + finished.stderr)


@pytest.mark.parametrize(
    "options",
    [(), ("--patch", 2, "--window", 4, "--whole-steps", 1, "--start", SHIPPED)],
    ids=["whole", "window"],
)
def test_it_trains_and_goes_on_from_its_checkpoint(tmp_path, options):
    pictures, out = tmp_path / "pictures", tmp_path / "out"
    pictures.mkdir()
    train(pictures, out, "--steps", 2, *options)
    first = load_file(out / "mini-flux.safetensors")
    train(pictures, out, "--steps", 3, *options)
    second = load_file(out / "mini-flux.safetensors")
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[key], second[key]) for key in first)
    with open(out / "log.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps[-1] == 3 and steps == sorted(set(steps))
    assert Image.open(out / "sheet.png").width > 16
