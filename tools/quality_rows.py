"""What is compared: ToMA's settings, other merges, and other ways to save the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from comfy.model_patcher import create_model_options_clone
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_easycache import EasyCacheNode
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.flux import FluxBlocks
from comfyui_toma.nodes.options import KEY
from comfyui_toma.nodes.toma import ToMAPatchFlux, ToMAPatchModel
from comfyui_toma.toma_core.config import Matching, MergeConfig
from comfyui_toma.toma_core.schedule import BEST_STEPS, parse_steps
from quality_trials import budget_over_regions, chosen_by_outputs, shifted_tiles
from torch import Tensor

Patch = Callable[[Any], Any]
"""Takes a MODEL and returns the patched one."""


@dataclass(frozen=True)
class Row:
    """One way to paint a picture.

    Attributes:
        group: of its colour in the plot.
        steps: share of the sampling steps that are taken.
    """

    group: str
    name: str
    patch: Patch
    steps: float = 1.0

    def steps_of(self, steps: int) -> int:
        """Steps that are taken instead of `steps`."""
        return max(1, round(self.steps * steps))


def toma(name: str, group: str = "ToMA", blocks: FluxBlocks | None = None, **config: Any) -> Row:
    """ToMA with the given fields of `MergeConfig`."""
    return Row(group, name, lambda model: attach(model, MergeConfig(**config), blocks))


def kept(ratio: float, interval: int, **config: Any) -> Row:
    """ToMA that keeps detail."""
    extra = "".join(f", {value}" for value in config.values())
    return toma(f"keep {ratio}, every {interval}{extra}", "ToMA, detail kept", ratio=ratio,
                reuse_interval=interval, keep_detail=True, **config)  # fmt: skip


def changed(what: str, node: Any = ToMAPatchModel, **inputs: Any) -> Row:
    """A node's defaults but for some inputs."""
    return Row(
        "ToMA, detail kept", f"defaults, {what}", lambda model: node_defaults(model, node, **inputs)
    )


def matched(method: str, name: str = "", threshold: float = 0.7, **config: Any) -> Row:
    """A method that matches tokens in pairs, anew at every step unless `config` says otherwise."""
    config = {"reuse_interval": 1, **config}
    matching = Matching(method, threshold)
    return toma(name or method, "other merges", scope="attention", matching=matching, **config)


def rows() -> list[Row]:
    """Every row of the table."""
    first_double = FluxBlocks(skip_first_double=1)
    doubles = FluxBlocks(skip_first_double=2)
    half = FluxBlocks(skip_first_double=2, skip_first_single=1)
    return [
        toma("ratio 0", ratio=0.0),
        toma("ratio 0.25", ratio=0.25),
        toma("ratio 0.5", ratio=0.5),
        toma("ratio 0.75", ratio=0.75),
        toma("modules", scope="modules"),
        toma("attention", scope="attention"),
        toma("queries only", scope="attention", merge_queries_only=True),
        toma("tile 4", tile_size=4),
        toma("stripe", region="stripe"),
        toma("global", region="global"),
        toma("every step anew", reuse_interval=1),
        toma("from 20 %", start_percent=0.2),
        toma("from 50 %", start_percent=0.5),
        toma("until 50 %", end_percent=0.5),
        toma("until 80 %", end_percent=0.8),
        toma("1 double whole", blocks=first_double),
        toma("doubles whole", blocks=doubles),
        toma("first 3 whole", blocks=half),
        *(kept(ratio, interval) for ratio in (0.25, 0.5, 0.75, 0.9) for interval in (2, 3, 5)),
        kept(0.5, 3, scope="modules"),
        kept(0.5, 3, scope="attention"),
        kept(0.5, 3, region="global"),
        Row("ToMA, detail kept", "node defaults", node_defaults),
        changed("from 20 %", start_percent=0.2),
        changed("until 80 %", end_percent=0.8),
        changed("1 double whole", ToMAPatchFlux, skip_first_double=1),
        changed("doubles whole", ToMAPatchFlux, skip_first_double=2),
        matched("ToMe", "ToMe 0.25", ratio=0.25),
        matched("ToMe", "ToMe 0.5"),
        matched("ToMe", "ToMe 0.75", ratio=0.75),
        matched("ToFu", "ToFu 0.25", ratio=0.25),
        matched("ToFu", "ToFu 0.5"),
        matched("ToFu", "ToFu 0.75", ratio=0.75),
        matched("CA-ToMe", selection_steps=parse_steps(BEST_STEPS)),
        matched("CA-ToMe", "CA-ToMe 0.9", 0.9, selection_steps=parse_steps(BEST_STEPS)),
        Row("other merges", "published ToMA", published_toma),
        Row("fewer steps", "3/4 of the steps", unchanged, 3 / 4),
        Row("fewer steps", "1/2 of the steps", unchanged, 1 / 2),
        Row("fewer steps", "1/3 of the steps", unchanged, 1 / 3),
        Row("caches", "reuse, every 2", lambda model: reuse(model, 2)),
        Row("caches", "reuse, every 3", lambda model: reuse(model, 3)),
        Row("caches", "EasyCache 0.1", lambda model: easy_cache(model, 0.1)),
        Row("caches", "EasyCache 0.2", lambda model: easy_cache(model, 0.2)),
        Row("both", "defaults, 3/4 steps", node_defaults, 3 / 4),
        Row("both", "defaults, EasyCache", lambda model: easy_cache(node_defaults(model), 0.2)),
        Row("tried", "shifted tiles", lambda model: shifted_tiles(node_defaults(model))),
        Row("tried", "budget", lambda model: budget_over_regions(node_defaults(model))),
        Row("tried", "by outputs", lambda model: chosen_by_outputs(node_defaults(model))),
    ]


def unchanged(model: Any) -> Any:
    """Stock."""
    return model


def node_defaults(model: Any, node: Any = ToMAPatchModel, **changes: Any) -> Any:
    """A node as it is when it is put into a graph, but for some inputs."""
    inputs = node.define_schema().inputs
    defaults = {one.id: one.default for one in inputs if getattr(one, "default", None) is not None}
    return node.execute(model, **{**defaults, **changes})[0]


def published_toma(model: Any) -> Any:
    """ToMA's released schedule for Flux, at the same share of this model's blocks.

    It merges at every third step only, chooses anew at each, and leaves the first 5 of 19 double
    and of 38 single blocks whole.
    """
    flux = model.model.diffusion_model
    blocks = FluxBlocks(
        skip_first_double=round(len(flux.double_blocks) * 5 / 19),
        skip_first_single=round(len(flux.single_blocks) * 5 / 38),
    )
    config = MergeConfig(ratio=0.5, scope="modules", tile_size=4, reuse_interval=1)
    patched = attach(model, config, blocks)

    def predict(executor: Any, x: Tensor, time: Tensor, options: dict, seed: int | None) -> Tensor:
        if step_of(options["transformer_options"], time) % 3:
            options = create_model_options_clone(options)
            for by_key in options["transformer_options"]["wrappers"].values():
                by_key.pop(KEY, None)
        return executor(x, time, options, seed)

    patched.add_wrapper(WrappersMP.PREDICT_NOISE, predict)
    return patched


def reuse(model: Any, every: int) -> Any:
    """Plain reuse: only every such step is computed, and the last one, as ToMA spares it too.

    At the steps between, a Flux block returns its input plus the change that it made at the last
    step that was computed.
    """
    patched = model.clone()
    changes: dict[tuple, dict[str, Tensor]] = {}

    def replace(kind: str, number: int, streams: tuple[str, ...]) -> None:
        def block(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Tensor]:
            options = arguments["transformer_options"]
            key = (kind, number, *options["uuids"])
            step, last = step_of(options, options["sigmas"]), len(options["sample_sigmas"]) - 2
            if step % every and step != last:
                return {name: arguments[name] + changes[key][name] for name in streams}
            before = {name: arguments[name].clone() for name in streams}  # blocks add in place
            result = extra["original_block"](arguments)
            changes[key] = {name: result[name] - before[name] for name in streams}
            return result

        patched.set_model_patch_replace(block, "dit", kind, number)

    flux = model.model.diffusion_model
    for number in range(len(flux.double_blocks)):
        replace("double_block", number, ("img", "txt"))
    for number in range(len(flux.single_blocks)):
        replace("single_block", number, ("img",))
    return patched


def easy_cache(model: Any, threshold: float) -> Any:
    """ComfyUI's own EasyCache node, but for the threshold at its defaults.

    It adds to its input in place, which in float32 is the sampler's own tensor and spoils the
    step: it gets a copy here, as a model of another precision gives it.
    """

    def copied(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return executor(x.clone(), *args, **kwargs)

    patched = model.clone()
    patched.add_wrapper(WrappersMP.DIFFUSION_MODEL, copied)  # first, so around EasyCache's own
    return EasyCacheNode.execute(patched, threshold, 0.15, 0.95, False)[0]


def step_of(options: dict[str, Any], sigma: Tensor) -> int:
    """The sampling step at `sigma`, from 0."""
    return int(torch.argmin((options["sample_sigmas"] - sigma.flatten()[0]).abs()))
