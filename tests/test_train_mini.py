"""`python tools train-mini` from the outside: it trains, stops, and goes on where it stopped."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file

TRAIN = Path(__file__).resolve().parent.parent / "tools" / "train_mini.py"


def train(folder, out, *options):
    for name, colour in (("red square", "red"), ("blue square", "blue")):
        Image.new("RGB", (16, 16), colour).save(folder / f"{name}.png")
    command = [sys.executable, TRAIN, "--images", folder, "--out", out, "--size", 16, "--batch", 2]
    command += ["--threads", 1, "--sheet", 1, "--precision", "fp32", *options]
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


def test_it_trains_and_goes_on_from_its_checkpoint(tmp_path):
    pictures, out = tmp_path / "pictures", tmp_path / "out"
    pictures.mkdir()
    train(pictures, out, "--steps", 2)
    first = load_file(out / "mini-flux.safetensors")
    train(pictures, out, "--steps", 3)
    second = load_file(out / "mini-flux.safetensors")
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[key], second[key]) for key in first)
    with open(out / "log.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps[-1] == 3 and steps == sorted(set(steps))
    assert Image.open(out / "sheet.png").width > 16
