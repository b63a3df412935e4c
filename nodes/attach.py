"""Attaches merging to a MODEL: picks the host, refuses what is unknown, opens and closes runs.

A node leaves only its settings and one wrapper in the MODEL. All state is made when sampling
starts, from settings and sigmas alone, and dropped when it ends, also after an error or an abort.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.model_base
import torch
from comfy.model_patcher import ModelPatcher, create_model_options_clone
from comfy.patcher_extension import WrappersMP
from torch import nn

from ..toma_core.config import MergeConfig
from ..toma_core.schedule import Schedule
from .flux import FluxBlocks, FluxHost
from .options import KEY
from .record import RECORD, Recording, is_wanted
from .report import Report, show_text
from .run import Run, SamplingRun
from .unet import UNetBlocks, UNetHost, is_image_unet

Blocks = UNetBlocks | FluxBlocks

LATENT_PIXELS = 8
"""Pixels per side of a latent pixel, for every supported model."""

BROKEN_LATENT = (
    "the latent holds NaN or inf, which are like nothing, so it is sampled without merging; check "
    "the node that it comes from"
)


@dataclass(frozen=True)
class Settings:
    """What one node asks for: plain values, safe to copy with the MODEL."""

    config: MergeConfig
    blocks: Blocks
    node_id: str | None = None
    mask: torch.Tensor | None = None


class UnsupportedModelError(ValueError):
    """The MODEL is of a kind that cannot be merged; the message names it."""


def attach(
    model: ModelPatcher,
    config: MergeConfig,
    blocks: Blocks | tuple[Blocks, ...] | None = None,
    node_id: str | None = None,
    mask: torch.Tensor | None = None,
) -> ModelPatcher:
    """A clone of ``model`` that merges tokens when it samples.

    Several nodes may follow one another: a later one takes over within its own part of the
    sampling range.

    Args:
        model: the MODEL; it stays as it is.
        config: settings of the merge; ratio 0 leaves the clone exactly stock.
        blocks: which blocks merge, of the kind of model that is expected, or of each kind; None
            takes either kind whole.
        node_id: node that shows what happened.
        mask: ``(..., height, width)`` of the picture, in any size: where tokens never merge.

    Raises:
        UnsupportedModelError: the model is no UNet for pictures and no Flux.1, or not of the kind
            that ``blocks`` expects.
    """
    whole = _supported(model)
    choices = blocks if isinstance(blocks, tuple) else (blocks or whole,)
    chosen = [choice for choice in choices if type(choice) is type(whole)]
    if not chosen:
        wanted, other = ("SDXL", "Flux") if type(whole) is FluxBlocks else ("Flux", "SDXL")
        raise UnsupportedModelError(
            f"this node merges {wanted} models, but the model is {_name(model)}. "
            f'Use "ToMA for {other}" or the plain "ToMA" node instead.'
        )
    patched = model.clone()
    if config.is_identity:
        before = patched.model_options.get("transformer_options", {}).get(KEY)
        others = " A node before this one still merges." if before else ""
        show_text(node_id, f"Inactive: {config.off_setting}.{others}")
        return patched
    options = patched.model_options.setdefault("transformer_options", {})
    options[KEY] = (*options.get(KEY, ()), Settings(config, chosen[0], node_id, mask))
    options[RECORD] = Recording()
    patched.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, outer_sample)
    return patched


def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps one sampling run, as an outer-sample wrapper, in a fresh ``SamplingRun``."""
    guider = executor.class_obj
    stock_options = guider.model_options
    sigmas = kwargs["sigmas"] if "sigmas" in kwargs else args[3]
    noise = kwargs["noise"] if "noise" in kwargs else args[0]
    latent = kwargs["latent_image"] if "latent_image" in kwargs else args[1]
    size = tuple(noise.shape[-2:])
    run, guider.model_options = open_run(guider.model_patcher, stock_options, sigmas, size)
    if not (noise.isfinite().all() and latent.isfinite().all()):
        run.decline(BROKEN_LATENT)
    try:
        result = executor(*args, **kwargs)
        run.finish()
        return result
    finally:
        guider.model_options = stock_options
        run.close()


def open_run(
    model: ModelPatcher, options: dict[str, Any], sigmas: torch.Tensor, size: tuple[int, int]
) -> tuple[SamplingRun, dict[str, Any]]:
    """A sampling run of a patched MODEL, and model options under which its calls merge.

    Args:
        model: that samples.
        options: model options with the settings of our nodes; they stay as they are.
        sigmas: of the run, in sampling order.
        size: rows and columns of the latent.
    """
    options = create_model_options_clone(options)
    transformer_options = options.setdefault("transformer_options", {})
    record = transformer_options.get(RECORD, Recording())
    wanted = is_wanted()
    record.begin(len(sigmas) - 1 if wanted else 0)
    run = SamplingRun(
        [
            _run(model, settings, sigmas, size, record if wanted else None)
            for settings in transformer_options.get(KEY, ())
        ]
    )
    wrappers = transformer_options.setdefault("wrappers", {})
    wrappers.setdefault(WrappersMP.CALC_COND_BATCH, {})[KEY] = [run.calc_cond_batch]
    wrappers.setdefault(WrappersMP.APPLY_MODEL, {})[KEY] = [run.apply_model]
    return run, options


def _run(
    model: ModelPatcher,
    settings: Settings,
    sigmas: torch.Tensor,
    size: tuple[int, int],
    record: Recording | None,
) -> Run:
    config = settings.config
    to_sigma = model.get_model_object("model_sampling").percent_to_sigma
    schedule = Schedule(
        tuple(float(sigma) for sigma in sigmas),
        start_sigma=float(to_sigma(config.start_percent))
        if config.start_percent > 0
        else float("inf"),
        end_sigma=float(to_sigma(config.end_percent)) if config.end_percent < 1 else float("-inf"),
        reuse_interval=config.reuse_interval,
        weight_interval=config.weight_steps,
        selection_steps=config.selection_steps,
        spares_last=config.keep_detail,
    )
    make_host: Callable[[nn.Module, Run], Any] = functools.partial(
        UNetHost if isinstance(settings.blocks, UNetBlocks) else FluxHost, chosen=settings.blocks
    )
    rows, columns = size
    subject = f"{_name(model)} {columns * LATENT_PIXELS}x{rows * LATENT_PIXELS}"
    report = Report(subject, settings.node_id, config.method.value)
    return Run(config, schedule, make_host, report, settings.mask, record)


def _supported(model: ModelPatcher) -> Blocks:
    """Default blocks of the kind of model that this is."""
    if type(model.model) is comfy.model_base.Flux:
        return FluxBlocks()
    if is_image_unet(model.model.diffusion_model):
        return UNetBlocks()
    raise UnsupportedModelError(
        f"this node merges tokens of SDXL, SD 1.5 and SD 2 (and checkpoints built on them) and of "
        f"Flux.1, but the model is {_name(model)}. Connect one of those, or remove this node."
    )


def _name(model: ModelPatcher) -> str:
    """Name of the model for people: that of its ComfyUI configuration, such as SDXL or Flux."""
    config = getattr(model.model, "model_config", None)
    return type(config or model.model).__name__
