"""The node "ToMA: Compare": the same picture at several ratios, how long each took, how it differs.

Every setting runs through ComfyUI's own KSampler code on a clone of the model; nothing of a run is
left in the model, also after an error or an abort.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import comfy.model_management
import comfy.samplers
import comfy.utils
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io
from PIL import Image, ImageDraw
from torch import Tensor

from ..toma_core.config import MAX_RATIO, MergeConfig
from .attach import attach
from .drawing import ACCENT, FAINT, INK, PAPER, font, to_tensor
from .options import KEY
from .report import show_text
from .toma import CATEGORY, make_input, node_id_of, pattern_inputs

RATIOS = "0, 0.25, 0.5, 0.75"
REFERENCE_NOTE = "Ratio 0 was not in the list; it ran first, as what the others are compared with."


class Result(NamedTuple):
    """What came of one ratio.

    Attributes:
        ratio: that ran.
        seconds: of sampling, without loading the model.
        difference: root mean square of what changed in the latents, as a share of the standard
            deviation of those of ratio 0.
    """

    ratio: float
    seconds: float
    difference: float


class Stopwatch:
    """Times the sampler alone, as a sampler-sample wrapper, and moves one bar for all runs."""

    def __init__(self, steps: int) -> None:
        self.seconds = 0.0
        self._done = 0
        self._bar = comfy.utils.ProgressBar(steps)

    def sampler_sample(
        self, executor: Any, guider: Any, sigmas: Tensor, extra: dict, callback: Any, *args: Any
    ) -> Tensor:
        """Runs the sampler; models are loaded by now."""

        def advance(step: int, *_: Any) -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            self._bar.update_absolute(self._done + step + 1)

        start = time.perf_counter()
        samples = executor(guider, sigmas, extra, advance, *args)
        samples.cpu()  # a GPU may still be at work
        self.seconds = time.perf_counter() - start
        self._done += len(sigmas) - 1
        return samples


def read_ratios(text: str) -> list[float]:
    """The ratios of a list such as "0, 0.25, 0.5", with 0 put in front where it is missing.

    Raises:
        ValueError: not a list of numbers from 0 to 0.9; the message shows one.
    """
    ratios = []
    for part in text.split(","):
        try:
            ratio = float(part)
        except ValueError:
            ratio = math.nan
        if not 0 <= ratio <= MAX_RATIO:
            raise ValueError(
                f"ratios must be numbers from 0 to {MAX_RATIO} with commas between them, got "
                f'{text!r}: "{part.strip()}" is none. Write them like this: "{RATIOS}".'
            )
        ratios.append(ratio)
    return ratios if 0 in ratios else [0.0, *ratios]


def difference(samples: Tensor, reference: Tensor) -> float:
    """Root mean square of what differs, over the standard deviation of ``reference``."""
    spread = reference.float().std(correction=0)
    return float((samples.float() - reference.float()).square().mean().sqrt() / spread)


def as_table(results: list[Result], stock_seconds: float) -> str:
    """One line per ratio under a heading, in columns."""
    rows = [("ratio", "seconds", "speed-up", "difference")]
    rows += [
        (
            f"{ratio:g}",
            f"{seconds:.2f}",
            f"{stock_seconds / seconds:.2f}x",
            f"{100 * change:.1f} %",
        )
        for ratio, seconds, change in results
    ]
    return "\n".join("".join(f"{cell:>11}" for cell in row) for row in rows)


def as_plot(results: list[Result]) -> Image.Image:
    """Seconds to the right, difference upwards, one point per ratio."""
    width, height, left, right, top, bottom = 768, 512, 96, 48, 56, 80
    across = _ticks(max(result.seconds for result in results))
    upwards = _ticks(100 * max(result.difference for result in results))
    picture = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(picture)

    def place(seconds: float, percent: float) -> tuple[float, float]:
        x = left + (width - left - right) * seconds / across[-1]
        return x, height - bottom - (height - top - bottom) * percent / upwards[-1]

    for seconds in across:
        x, y = place(seconds, 0)
        draw.line((x, top, x, y), FAINT)
        draw.text((x, y + 8), f"{seconds:g}", INK, font(16), "ma")
    for percent in upwards:
        x, y = place(0, percent)
        draw.line((x, y, width - right, y), FAINT)
        draw.text((x - 8, y), f"{percent:g} %", INK, font(16), "rm")
    draw.text(((left + width - right) / 2, height - 16), "seconds", INK, font(20), "ms")
    draw.text((left, 16), "difference from ratio 0", INK, font(20), "la")
    ordered = sorted(results)
    points = [place(result.seconds, 100 * result.difference) for result in ordered]
    draw.line(points, ACCENT, 2)
    for (x, y), result in zip(points, ordered, strict=True):
        draw.ellipse((x - 6, y - 6, x + 6, y + 6), ACCENT)
        draw.text((x + 10, y - 8), f"{result.ratio:g}", INK, font(20), "ls")
    return picture


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to beyond ``most``."""
    step = 10 ** math.floor(math.log10(most)) if most > 0 else 1.0
    step *= next(part for part in (0.2, 0.5, 1, 2) if most / (part * step) < 6)
    return [round(number * step, 9) for number in range(math.floor(most / step) + 2)]


class ToMABenchmark(io.ComfyNode):
    """Samples the same latent at several ratios and compares them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        sampler = comfy.samplers.KSampler
        return io.Schema(
            node_id="ToMABenchmark",
            display_name="ToMA: Compare",
            category=CATEGORY,
            description="Samples with the same seed at several ratios, and shows how long each "
            "took and how far it is from the picture without merging. Use it in place of a "
            "KSampler.",
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The model to try settings on: any that the node of ToMA takes, "
                    "without such a node before this one.",
                ),
                io.Conditioning.Input("positive", tooltip="What you want in the picture."),
                io.Conditioning.Input("negative", tooltip="What you do not want in the picture."),
                io.Latent.Input("latent_image", tooltip="The latent that every run starts from."),
                io.String.Input(
                    "ratios",
                    default=RATIOS,
                    tooltip="The ratios to compare, 0 to 0.9, with commas between them. 0 is the "
                    "model without merging; if it is not in the list, it runs first.",
                ),
                make_input(
                    io.Int.Input,
                    "seed",
                    default=0,
                    min=0,
                    max=2**64 - 1,
                    control_after_generate=True,
                    tooltip="The seed of the noise, the same for every run.",
                ),
                io.Int.Input(
                    "steps",
                    default=20,
                    min=1,
                    max=10000,
                    tooltip="How many sampling steps each run takes.",
                ),
                io.Float.Input(
                    "cfg",
                    default=8.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="How closely the picture follows the prompt. 1 for Flux.",
                ),
                io.Combo.Input(
                    "sampler_name",
                    options=sampler.SAMPLERS,
                    tooltip="The sampler, as in KSampler.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=sampler.SCHEDULERS,
                    tooltip="How the noise falls from step to step, as in KSampler.",
                ),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip="How much of the latent is made anew: 1 all of it.",
                ),
                *pattern_inputs(),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Latent.Output(
                    tooltip="The latents of every ratio as one batch, in the order of the table."
                ),
                io.String.Output(
                    display_name="table",
                    tooltip="Ratio, seconds, how many times as fast as ratio 0, and how far the "
                    "latent is from that of ratio 0.",
                ),
                io.Image.Output(
                    display_name="plot",
                    tooltip="Seconds against difference, one point for each ratio.",
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        ratios: str,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        positive: list,
        negative: list,
        latent_image: dict[str, Any],
        denoise: float,
        **pattern: Any,
    ) -> io.NodeOutput:
        from nodes import common_ksampler  # here: tools and tests load the pack without it

        wanted = read_ratios(ratios)
        if model.model_options.get("transformer_options", {}).get(KEY):
            raise ValueError(
                "the model already merges tokens, so ratio 0 would not be the model without "
                "merging. Connect the model from before the ToMA node."
            )
        configs = [MergeConfig(ratio=ratio, **pattern) for ratio in wanted]
        for config in configs:
            if config.ratio and config.off_setting:
                raise ValueError(
                    f"nothing would merge: {config.off_setting}. Set reuse_interval to 2 or more, "
                    "or switch keep_detail off."
                )
        node_id = node_id_of(cls)
        # All of them first: an unsupported model is refused before anything runs.
        models = [attach(model, config, node_id=node_id) for config in configs]
        watch = Stopwatch(1 + steps * len(wanted))

        def sample(model: Any, steps: int) -> Tensor:
            comfy.model_management.throw_exception_if_processing_interrupted()
            timed = model.clone()
            timed.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, watch.sampler_sample)
            arguments = (seed, steps, cfg, sampler_name, scheduler, positive, negative)
            return common_ksampler(timed, *arguments, latent_image, denoise)[0]["samples"]

        sample(model, 1)  # loads the model, and all that is slow once
        samples, seconds = [], []
        for merging in models:
            samples.append(sample(merging, steps))
            seconds.append(watch.seconds)
        stock = wanted.index(0)
        changes = [difference(latents, samples[stock]) for latents in samples]
        results = [Result(*row) for row in zip(wanted, seconds, changes, strict=True)]
        table = as_table(results, seconds[stock])
        if len(wanted) > len(ratios.split(",")):
            table += f"\n{REFERENCE_NOTE}"
        show_text(node_id, table)
        return io.NodeOutput({"samples": torch.cat(samples)}, table, to_tensor(as_plot(results)))
