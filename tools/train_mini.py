"""Train a Flux-class mini model on named pictures, from scratch or from where it stopped.

Leaves in its folder: `mini-flux.safetensors` for ComfyUI's UNETLoader, `log.csv`, `sheet.png`
(training picture and painted picture side by side) and the checkpoint to go on from.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
from mini_checkpoint import (
    Log,
    latest_step,
    load_checkpoint,
    load_weights,
    patch_of,
    save_checkpoint,
    save_weights,
)
from mini_flux import LATENT_PATCH, FluxShape, MiniFlux
from mini_options import parse
from mini_pictures import Picture, PictureSet, emoji, folder_of_images, pixels_of, scenes
from mini_sheet import picture_channels, sample_names, save_sheet
from mini_training import (
    Training,
    batch_loss,
    examples_of,
    halve_tokens,
    learning_rate,
    silence_padding,
)
from packages import Failed, say
from torch import Tensor

LOG_EVERY = 10
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
SECONDS_BETWEEN_LINES = 10.0


class StopRequest:
    """Turns Ctrl-C, a closed terminal and termination into a flag: no step is cut in half."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> StopRequest:
        present = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
        self._before = {
            number: signal.signal(number, self._note)
            for number in present
            if signal.getsignal(number) != signal.SIG_IGN  # as nohup wants it
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.signal = number


class Run:
    """One call of the command: everything between reading the options and the last file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out)
        self.device = torch.device(options.device)
        self.geometry = {"patch": options.patch, "size": options.size}
        # a token is 2x2 latent positions, so each of them takes half a token's pixels a side
        self.fold = options.patch // LATENT_PATCH
        self.channels = picture_channels(self.fold)
        source = self._source()
        self.licence = source.licence
        self.pictures = self._choose(source.pictures)
        self.examples = examples_of(self.pictures, options.size, self.fold, self.device)
        self._make_folder()
        self.training = self._begin()
        self.log = Log(self.out / "log.csv", self.training.step)

    def _source(self) -> PictureSet:
        if self.options.images:
            return folder_of_images(Path(self.options.images))
        return scenes() if self.options.scenes else emoji()

    def _make_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Failed(
                f"--out must be a folder that can be made, got {self.out} ({error.strerror}): "
                "choose another"
            ) from error

    def _choose(self, pictures: list[Picture]) -> list[Picture]:
        wanted = self.options.pictures or len(pictures)
        if wanted > len(pictures):
            raise Failed(
                f"--pictures can be at most {len(pictures)} (all there are), got {wanted}: "
                "ask for fewer, or bring your own with --images"
            )
        return pictures[:wanted]

    def _begin(self) -> Training:
        """The training that `--out` holds, one from the weights of `--start`, or a new one."""
        step = latest_step(self.out)
        if step:
            training = load_checkpoint(self.out, step, self.geometry, self.device)
            print(f"Going on from step {step} in {self.out}")
            return training
        start = self._start(Path(self.options.start)) if self.options.start else None
        shape = FluxShape.of(start) if start else FluxShape()
        training = Training(shape, self.device, self.options.seed)
        for model in (training.model, training.average):
            if start:
                model.load_state_dict(start)
            silence_padding(model, self.channels)
        return training

    def _start(self, file: Path) -> dict[str, Tensor]:
        weights, patch, wanted = load_weights(file), patch_of(file), self.options.patch
        if patch == wanted:
            return weights
        if patch == 2 * wanted:
            return halve_tokens(weights)
        raise Failed(
            f"--start must be a model of {wanted} or {2 * wanted} pixels a token for --patch "
            f"{wanted}, got one of {patch}: use --patch {patch}"
        )

    def go(self) -> int:
        """Train to the last step or the first signal; returns the exit status."""
        options, training = self.options, self.training
        tokens = (options.size // options.patch) ** 2
        parameters = sum(weight.numel() for weight in training.model.parameters())
        print(
            f"{len(self.pictures)} pictures, {tokens} image tokens, "
            f"{parameters / 1e6:.2f} M parameters, {options.precision} on {self.device}"
        )
        print(f"Artwork: {self.licence}", flush=True)
        if training.step >= options.steps:
            print(f"Already at step {training.step}: give a larger --steps to go on")
            return 0
        with StopRequest() as stop:
            self._train(stop)
            if stop.signal:
                self._save()
                print(f"Stopped at step {training.step} and saved: run again to go on", flush=True)
                return 128 + stop.signal
        return 0

    def _train(self, stop: StopRequest) -> None:
        options, training = self.options, self.training
        losses: list[Tensor] = []
        since, line_due = time.monotonic(), 0.0
        while training.step < options.steps and not stop.signal:
            rate = learning_rate(training.step, options.steps, options.learning_rate)
            losses.append(training.advance(self._loss, rate))
            finished = training.step == options.steps
            save_due = finished or training.step % options.save_every == 0
            if save_due or stop.signal or training.step % LOG_EVERY == 0:
                loss = self._mean(losses)
                seconds = (time.monotonic() - since) / len(losses)
                self.log.add(training.step, loss, rate, seconds)
                if finished or time.monotonic() >= line_due:
                    left = time_left(seconds * (options.steps - training.step))
                    print(
                        f"step {training.step}/{options.steps}  loss {loss:.4f}  "
                        f"{seconds:.2f} s/step  {left} left",
                        flush=True,
                    )
                    line_due = time.monotonic() + SECONDS_BETWEEN_LINES
                if save_due and not stop.signal:
                    self._save()
                    self._paint()
                losses, since = [], time.monotonic()

    def _mean(self, losses: list[Tensor]) -> float:
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            raise Failed(
                f"the loss must stay finite, got {loss} at step {self.training.step}: run again "
                "(it goes on from the last checkpoint) with a lower --learning-rate"
            )
        return loss

    def _loss(self, model: MiniFlux) -> Tensor:
        # seeded by the step: a run that stopped and went on equals one that never stopped
        seed = self.options.seed * 1_000_003 + self.training.step
        generator = torch.Generator().manual_seed(seed)
        bf16 = self.options.precision == "bf16"
        whole = self.training.step >= self.options.steps - self.options.whole_steps
        window = 0 if whole else self.options.window
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return batch_loss(
                model, self.examples, self.options.batch, self.channels, window, generator
            )

    def _save(self) -> None:
        options, step = self.options, self.training.step
        save_checkpoint(self.out, self.training, self.geometry)
        about = {
            "about": f"Flux-class mini model, {len(self.pictures)} pictures of {options.size} px, "
            f"{options.patch}x{options.patch} pixels a token, {step} steps",
            "pictures": json.dumps([picture.name for picture in self.pictures]),
            "artwork": self.licence,
            **{key: str(value) for key, value in self.geometry.items()},
        }
        save_weights(self.out / "mini-flux.safetensors", self.training.average, about)

    def _paint(self) -> None:
        """Write the sample sheet and say how near the painted pictures are to the true ones."""
        size = self.options.size
        shown = self.pictures[:: max(1, len(self.pictures) // self.options.sheet)]
        shown = shown[: self.options.sheet]
        names = [picture.name for picture in shown]
        truth = torch.stack([pixels_of(picture, size) for picture in shown])
        painted = sample_names(self.training.average, names, size, self.fold).clamp(-1, 1)
        save_sheet(self.out / "sheet.png", names, truth, painted)
        # values span 2, so the peak signal squared is 4
        errors = (painted - truth).square().mean(dim=(1, 2, 3)).clamp_min(1e-12)
        near = (10 * torch.log10(4 / errors)).mean()
        print(
            f"step {self.training.step}: saved to {self.out}; {len(names)} pictures painted, "
            f"PSNR to the training pictures {near:.1f} dB on average",
            flush=True,
        )


def time_left(seconds: float) -> str:
    """`seconds` for a person: the two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    options = parse(argv, __doc__)
    if hasattr(os, "nice"):
        os.nice(19)  # hours of background work must not slow what the person does meanwhile
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        return Run(options).go()
    except (Failed, OSError) as error:
        say(f"Stopped: {error}")  # the same words as the dispatcher's, for a run without it
        return 1
    except KeyboardInterrupt:
        say("Stopped before the first step.")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
