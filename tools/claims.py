"""`python tools claims`: the two claims of CA-ToMe as counts, on small models.

First, tokens are matched at few steps; second, the more alike tokens become while a picture is
painted, the more of them merge. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mini_host import MODEL, MiniModel, load_host
from mini_sheet import GUIDANCE

TINY_MODELS = Path(__file__).resolve().parent.parent / "tests" / "support"
PICTURE = "cat face, sky"
STEPS = 50
LATENT_SIDE = 64  # at its finest, attention of both models has a token for every 2x2 of it
TOKENS = (LATENT_SIDE // 2) ** 2
SEED = 3


@dataclass(frozen=True)
class Row:
    """What happened at one step: mean over blocks and conditions.

    Attributes:
        step: the first is 0.
        likeness: cosine of a token to the token most like it.
        merged: tokens that merged into others.
    """

    step: int
    likeness: float
    merged: float


@dataclass(frozen=True)
class Subject:
    """A model that samples, and how."""

    name: str
    model: Any
    sample: Callable[[Any, Callable], None]


def main(argv: list[str]) -> int:
    """Measure and print; returns the exit code."""
    options = parse(argv)
    load_host()
    sys.path.append(str(TINY_MODELS))
    subjects = [mini_flux(options.model), tiny_unet()]
    print(f"CA-ToMe, threshold {options.threshold}, {STEPS} steps, {TOKENS} tokens in a block.\n")
    print("| model | blocks | CA-ToMe matches at | ToMe matches at |\n|---|---|---|---|")
    tables = []
    for subject in subjects:
        rows, blocks = measure(subject, "CA-ToMe", options.threshold)
        every, _ = measure(subject, "ToMe", options.threshold)
        print(f"| {subject.name} | {blocks} | {len(rows)} steps | {len(every)} steps |")
        tables.append(rows)
    print("\n| step |" + "".join(f" {s.name}: likeness | merged |" for s in subjects))
    print("|---|" + "---|---|" * len(subjects))
    for rows in zip(*tables, strict=True):
        cells = "".join(f" {row.likeness:.3f} | {row.merged:.0f} |" for row in rows)
        print(f"| {rows[0].step} |{cells}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python tools claims", description=__doc__)
    parser.add_argument("--threshold", type=float, default=0.7, help="cosine (default 0.7)")
    parser.add_argument("--model", type=Path, default=MODEL, help="the mini model's file")
    return parser.parse_args(argv)


def mini_flux(file: Path) -> Subject:
    """The mini model of the demo, painting one of its pictures."""
    mini = MiniModel(file)

    def sample(model: Any, callback: Callable) -> None:
        mini.sample(model, [PICTURE], [SEED], STEPS, callback)

    return Subject("mini Flux", mini.model, sample)


def tiny_unet() -> Subject:
    """A UNet of SDXL's shape with random weights.

    Such weights paint nothing, so the picture that it is to find is given: the UNet works on the
    true noisy picture of every step, and the sampler follows the given one.
    """
    import tiny

    picture = torch.zeros(1, 4, LATENT_SIDE, LATENT_SIDE)
    picture[:, :, :32] = 1.5
    picture[:, :2, :, :24] = -1.0
    generator = torch.Generator().manual_seed(SEED)
    picture[:, :, 40:56, 40:56] = torch.randn(1, 4, 16, 16, generator=generator)

    def knowing(apply_model: Callable, call: dict[str, Any]) -> Any:
        apply_model(call["input"], call["timestep"], **call["c"])
        return picture.to(call["input"]).expand_as(call["input"])

    def sample(model: Any, callback: Callable) -> None:
        tiny.sample(model, LATENT_SIDE, LATENT_SIDE, steps=STEPS, cfg=GUIDANCE, callback=callback)

    model = tiny.sdxl()
    model.set_model_unet_function_wrapper(knowing)
    return Subject("tiny UNet", model, sample)


def measure(subject: Subject, method: str, threshold: float) -> tuple[list[Row], int]:
    """Every step at which a method matches, and the number of blocks that do."""
    import watch
    from comfyui_toma.nodes.token_merge import TokenMergePatchModel
    from comfyui_toma.toma_core.schedule import BEST_STEPS

    patched = TokenMergePatchModel.execute(
        subject.model, method, 0.5, threshold, BEST_STEPS, "2", SEED
    )[0]
    rows: list[Row] = []
    blocks: set[int] = set()
    with watch.plans() as made:

        def after_step(step: int, *_: Any) -> None:
            if made:
                likeness = statistics.fmean(plan.likeness for plan in made)
                merged = statistics.fmean(n for plan in made for n in plan.merged_away)
                rows.append(Row(step, likeness, merged))
                blocks.update(plan.block for plan in made)
                made.clear()

        subject.sample(patched, after_step)
    return rows, len(blocks)
