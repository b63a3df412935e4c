"""Files of a training run: checkpoint, weights for ComfyUI and the log.

A checkpoint is a pair of files that carry their step in the name, each written under another
name first. A run that dies while saving leaves the pair before it whole.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from mini_flux import FluxShape, MiniFlux, current_keys
from mini_training import Training
from packages import Failed
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "checkpoint-"


def load_weights(file: Path) -> dict[str, Tensor]:
    """The weights of a mini model, in float32 and with the key names of `MiniFlux`.

    Raises:
        Failed: the file is missing, broken or of another kind of model.
    """
    try:
        weights = current_keys(load_file(file))
    except (OSError, SafetensorError) as error:
        raise Failed(
            f"{file} must be a readable .safetensors file, but is not ({error}): check the path"
        ) from error
    if not _is_mini(weights):
        raise Failed(
            f"{file} must be a Flux model of 16 latent channels and text width 64, but is not: "
            "give a model that train-mini wrote"
        )
    return {key: tensor.float() for key, tensor in weights.items()}


def patch_of(file: Path) -> int:
    """Pixels a side of a token of the model in `file`; files that do not say so are of 4."""
    with safe_open(file, "pt") as opened:
        return int((opened.metadata() or {}).get("patch", 4))


def _is_mini(weights: dict[str, Tensor]) -> bool:
    """Whether `weights` are those of a `MiniFlux`, of any width and depth, for our prompts."""
    try:
        shape = FluxShape.of(weights)
    except (KeyError, ValueError):
        return False
    usual = FluxShape(
        hidden=shape.hidden,
        double_blocks=shape.double_blocks,
        single_blocks=shape.single_blocks,
    )
    if shape != usual:
        return False
    with torch.device("meta"):
        fitting = MiniFlux(shape).state_dict()
    return {key: tensor.shape for key, tensor in weights.items()} == {
        key: tensor.shape for key, tensor in fitting.items()
    }


def save_weights(file: Path, model: MiniFlux, about: dict[str, str]) -> None:
    """Write `model` in float16, readable by ComfyUI's UNETLoader, with `about` as metadata."""
    weights = {key: tensor.half() for key, tensor in model.state_dict().items()}
    with _replacing(file) as scratch:
        save_file(weights, scratch, metadata={"format": "pt", **about})


def latest_step(folder: Path) -> int:
    """The step of the newest whole checkpoint in `folder`, 0 where there is none."""
    states = folder.glob(f"{PREFIX}*.pt")
    whole = [state for state in states if state.with_suffix(".safetensors").is_file()]
    return max((int(state.stem.removeprefix(PREFIX)) for state in whole), default=0)


def save_checkpoint(folder: Path, training: Training, geometry: dict[str, int]) -> None:
    """Write all that going on needs, then remove the checkpoints of earlier steps."""
    weights = {
        f"{part}.{key}": tensor
        for part, model in (("model", training.model), ("average", training.average))
        for key, tensor in model.state_dict().items()
    }
    state = {"optimiser": training.optimiser.state_dict(), "geometry": geometry}
    name = f"{PREFIX}{training.step:07d}"
    with _replacing(folder / f"{name}.safetensors") as scratch:
        save_file(weights, scratch)
    with _replacing(folder / f"{name}.pt") as scratch:
        torch.save(state, scratch)
    for file in folder.glob(f"{PREFIX}*"):
        if file.suffix in (".pt", ".safetensors") and file.stem != name:
            file.unlink()


def load_checkpoint(
    folder: Path, step: int, geometry: dict[str, int], device: torch.device
) -> Training:
    """The training in `folder` as it was at `step`.

    Raises:
        Failed: the checkpoint is damaged, or of another `geometry`.
    """
    state_file = folder / f"{PREFIX}{step:07d}.pt"
    try:
        weights = load_file(state_file.with_suffix(".safetensors"), device=str(device))
        state = torch.load(state_file, map_location=device, weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise Failed(
            f"{state_file} and its .safetensors must be whole, but are damaged ({error}): "
            "remove them to begin anew, or use another --out"
        ) from error
    if state["geometry"] != geometry:
        raise Failed(
            f"{folder} holds a training of {state['geometry']}, got {geometry}: "
            "use the same --patch and --size, or another --out"
        )
    of_part: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}}
    for key, tensor in weights.items():
        part, name = key.split(".", 1)
        of_part[part][name] = tensor
    training = Training(FluxShape.of(of_part["model"]), device, seed=0)
    training.model.load_state_dict(of_part["model"])
    training.average.load_state_dict(of_part["average"])
    training.optimiser.load_state_dict(state["optimiser"])
    training.step = step
    return training


class Log:
    """CSV of step, loss, learning rate and seconds per step; rows past `step` are dropped."""

    COLUMNS = ("step", "loss", "learning_rate", "seconds_per_step")

    def __init__(self, file: Path, step: int) -> None:
        self.file = file
        kept: list[list[str]] = []
        if file.is_file() and step:
            with file.open(newline="", encoding="utf-8") as opened:
                kept = [row for row in csv.reader(opened) if row and row[0].isdigit()]
            kept = [row for row in kept if int(row[0]) <= step]
        self._write("w", [list(self.COLUMNS), *kept])

    def add(self, step: int, loss: float, rate: float, seconds: float) -> None:
        """Append one row."""
        self._write("a", [[str(step), f"{loss:.6f}", f"{rate:.3e}", f"{seconds:.4f}"]])

    def _write(self, mode: str, rows: list[list[str]]) -> None:
        with self.file.open(mode, newline="", encoding="utf-8") as opened:
            csv.writer(opened, lineterminator="\n").writerows(rows)


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """Write to the path given, which takes the place of `file` only when all went well."""
    scratch = file.with_suffix(".tmp")
    try:
        yield scratch
        os.replace(scratch, file)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise Failed(
            f"{file} must be writable, but is not ({error}): free disk space or close the "
            "programs that use it, then run again"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
