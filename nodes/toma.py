"""The ToMA nodes: schemas and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

from comfy_api.latest import io

from ..toma_core.config import MAX_INTERVAL, MAX_RATIO, MAX_TILE_SIZE, MergeConfig, Region, Scope
from .attach import attach
from .flux import FluxBlocks
from .presets import PRESETS
from .unet import UNetBlocks

CATEGORY = "model/ToMA"
_DEFAULTS = MergeConfig(**PRESETS["SDXL"]["balanced"])
"""What a new node starts with; docs/quality.md says why."""


def make_input(kind: type, name: str, **options: Any) -> Any:
    """An input of ``kind`` with those options that the running ComfyUI knows.

    ``advanced`` is younger than the oldest ComfyUI supported; an unknown keyword would take the
    whole node away.
    """
    known = inspect.signature(kind.__init__).parameters
    return kind(name, **{key: value for key, value in options.items() if key in known})


def _basic_inputs(models: str) -> list[Any]:
    return [
        io.Model.Input("model", tooltip=f"The model to speed up: {models}."),
        make_input(
            io.Float.Input,
            "ratio",
            default=_DEFAULTS.ratio,
            min=0.0,
            max=MAX_RATIO,
            step=0.05,
            tooltip="Share of the picture's tokens that is merged away, 0 to 0.9. Higher is faster "
            "and loses more detail. 0 switches the node off: the picture is exactly the same as "
            "without it.",
        ),
        *pattern_inputs(),
    ]


def pattern_inputs() -> list[Any]:
    """How tokens are chosen and for how long, at any ratio."""
    return [
        make_input(
            io.Int.Input,
            "tile_size",
            default=_DEFAULTS.tile_size,
            min=1,
            max=MAX_TILE_SIZE,
            tooltip="Side of the square tiles within which tokens merge, in tokens (one token is "
            "16 pixels wide in Flux, 16 to 32 in SDXL). Larger tiles find more alike tokens; "
            "smaller ones are cheaper.",
        ),
        make_input(
            io.Int.Input,
            "reuse_interval",
            default=_DEFAULTS.reuse_interval,
            min=1,
            max=MAX_INTERVAL,
            tooltip="For how many sampling steps a choice of tokens is kept before it is made "
            "anew. Higher is faster; lower follows the picture more closely. With keep_detail at "
            "least 2, since the steps of a choice run whole.",
        ),
        make_input(
            io.Boolean.Input,
            "keep_detail",
            default=_DEFAULTS.keep_detail,
            tooltip="On: the steps at which tokens are chosen and the last step run whole, and "
            "what merging would lose is kept and added back in the steps between. Far closer to "
            "the picture without merging, for some of the speed and some memory (the node says "
            "how much). Off: every step merges and the picture changes; set ratio to 0.25 or less.",
        ),
    ]


def _advanced_inputs() -> list[Any]:
    return [
        make_input(
            io.Combo.Input,
            "region",
            options=[region.value for region in Region],
            default=_DEFAULTS.region.value,
            advanced=True,
            tooltip="Which tokens may merge with one another: those of a square tile, of a stripe "
            "of whole rows, or of the whole picture (global, slow to choose at large sizes).",
        ),
        make_input(
            io.Combo.Input,
            "scope",
            options=[scope.value for scope in Scope],
            default=_DEFAULTS.scope.value,
            advanced=True,
            tooltip="What works on merged tokens. block: whole transformer blocks, fastest. "
            "modules: each part of a block by itself, as in the paper. attention: self-attention "
            "only, slowest.",
        ),
        make_input(
            io.Int.Input,
            "weight_interval",
            default=_DEFAULTS.weight_interval,
            min=1,
            max=MAX_INTERVAL,
            advanced=True,
            tooltip="For how many sampling steps the weights of a merge are kept before they are "
            "computed anew, between two choices of tokens. Without effect while keep_detail is on.",
        ),
        *range_inputs(),
    ]


def _protect_input() -> Any:
    return io.Mask.Input(
        "protect",
        optional=True,
        tooltip="Where tokens never merge: faces, writing, the edge of an inpainted part. The "
        "mask is stretched to the picture and counts where it is brighter than half. Speed falls "
        "with its size.",
    )


def range_inputs() -> list[Any]:
    """The part of the sampling range in which a node merges."""
    return [
        make_input(
            io.Float.Input,
            "start_percent",
            default=_DEFAULTS.start_percent,
            min=0.0,
            max=1.0,
            step=0.01,
            advanced=True,
            tooltip="Part of the sampling range at which merging begins: 0 is the first step, "
            "1 the end.",
        ),
        make_input(
            io.Float.Input,
            "end_percent",
            default=_DEFAULTS.end_percent,
            min=0.0,
            max=1.0,
            step=0.01,
            advanced=True,
            tooltip="Part of the sampling range at which merging ends: 1 is the last step. Lower "
            "it to let the last steps restore detail.",
        ),
    ]


def _schema(node_id: str, name: str, description: str, models: str, extra: list[Any]) -> io.Schema:
    return io.Schema(
        node_id=node_id,
        display_name=name,
        category=CATEGORY,
        description=description,
        inputs=[*_basic_inputs(models), *_advanced_inputs(), *extra, _protect_input()],
        hidden=[io.Hidden.unique_id],
        outputs=[io.Model.Output(tooltip="The model, which merges tokens when it samples.")],
    )


def node_id_of(node: type[io.ComfyNode]) -> str | None:
    """Id of the node in the graph that runs, None outside of a graph."""
    return getattr(getattr(node, "hidden", None), "unique_id", None)


class ToMAPatchModel(io.ComfyNode):
    """Merges tokens of whichever supported model is connected."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "ToMAPatchModel",
            "ToMA",
            "Makes SDXL and Flux faster by merging image tokens that are alike (ToMA). Put "
            "it right before the sampler.",
            "SDXL, SD 1.5, SD 2 or Flux.1",
            [],
        )

    @classmethod
    def execute(cls, model: Any, protect: Any = None, **values: Any) -> io.NodeOutput:
        config = MergeConfig(**values)
        return io.NodeOutput(attach(model, config, node_id=node_id_of(cls), mask=protect))


class ToMAPatchSDXL(io.ComfyNode):
    """Merges tokens of a UNet, with a choice of its levels and stages."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        chosen = UNetBlocks()
        return _schema(
            "ToMAPatchSDXL",
            "ToMA for SDXL",
            "ToMA with a choice of levels and stages of the UNet, for SDXL, SD 1.5, SD 2 and "
            "models built on them.",
            "SDXL, SD 1.5 or SD 2",
            [
                make_input(
                    io.Combo.Input,
                    "max_downsample",
                    options=["1", "2", "4", "8"],
                    default=str(chosen.max_downsample),
                    advanced=True,
                    tooltip="Coarsest level of the UNet that merges: 1 is the size of the latent, "
                    "2 half of it, and so on. SDXL attends at 2 and 4.",
                ),
                *(
                    make_input(
                        io.Boolean.Input,
                        f"{stage}_block{plural}",
                        default=True,
                        advanced=True,
                        tooltip=f"Whether the {stage} stage of the UNet merges.",
                    )
                    for stage, plural in (("input", "s"), ("middle", ""), ("output", "s"))
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        max_downsample: str = "8",
        input_blocks: bool = True,
        middle_block: bool = True,
        output_blocks: bool = True,
        protect: Any = None,
        **values: Any,
    ) -> io.NodeOutput:
        blocks = UNetBlocks(int(max_downsample), input_blocks, middle_block, output_blocks)
        return io.NodeOutput(attach(model, MergeConfig(**values), blocks, node_id_of(cls), protect))


class ToMAPatchFlux(io.ComfyNode):
    """Merges tokens of Flux.1, with blocks at either end left alone on request."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "ToMAPatchFlux",
            "ToMA for Flux",
            "ToMA with a choice of the blocks that merge, for every model of the Flux.1 family, "
            "such as dev, schnell, Fill and Kontext.",
            "Flux.1",
            [
                make_input(
                    io.Int.Input,
                    f"skip_{end}_{kind}",
                    default=0,
                    min=0,
                    max=most,
                    advanced=True,
                    tooltip=f"How many {kind} blocks stay unmerged, counted from the {end} one "
                    f"(Flux.1 has {most}). Raise it when fine detail suffers; each block left "
                    "alone costs speed.",
                )
                for kind, most in (("double", 19), ("single", 38))
                for end in ("first", "last")
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        skip_first_double: int = 0,
        skip_last_double: int = 0,
        skip_first_single: int = 0,
        skip_last_single: int = 0,
        protect: Any = None,
        **values: Any,
    ) -> io.NodeOutput:
        blocks = FluxBlocks(
            skip_first_double, skip_last_double, skip_first_single, skip_last_single
        )
        return io.NodeOutput(attach(model, MergeConfig(**values), blocks, node_id_of(cls), protect))
