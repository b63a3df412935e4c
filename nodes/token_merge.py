"""The node of the methods that match tokens in pairs: CA-ToMe, ToMe and ToFu."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..toma_core.config import MAX_MATCHED_RATIO, Matching, MergeConfig, Method, Scope
from ..toma_core.schedule import BEST_STEPS, parse_steps
from .attach import attach
from .flux import FluxBlocks
from .toma import CATEGORY, make_input, node_id_of, range_inputs
from .unet import UNetBlocks

METHODS = [Method.CA_TOME.value, Method.TOME.value, Method.TOFU.value]
MAX_DOWNSAMPLE = 2
"""SDXL attends at half the latent's size and below: at 1, nothing of it would merge."""
_DEFAULTS = MergeConfig()
_MATCHING = Matching()


class TokenMergePatchModel(io.ComfyNode):
    """Merges tokens in self-attention by one of the methods that ToMA is measured against."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TokenMergePatchModel",
            display_name="Token Merging (CA-ToMe / ToMe / ToFu)",
            category=CATEGORY,
            description="Merges alike image tokens in self-attention by CA-ToMe, ToMe "
            "or ToFu. For comparison: the node of ToMA is faster and merges more. Put it right "
            "before the sampler.",
            inputs=[*_basic_inputs(), *_advanced_inputs(), *range_inputs()],
            hidden=[io.Hidden.unique_id],
            outputs=[io.Model.Output(tooltip="The model, which merges tokens when it samples.")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        method: str,
        ratio: float,
        threshold: float,
        refresh_steps: str,
        max_downsample: str,
        seed: int,
        **values: Any,
    ) -> io.NodeOutput:
        matching = Matching(Method(method), threshold, seed)
        adaptive = matching.method is Method.CA_TOME
        config = MergeConfig(
            ratio=ratio,
            scope=Scope.ATTENTION,
            reuse_interval=1,
            selection_steps=parse_steps(refresh_steps) if adaptive else (),
            matching=matching,
            **values,
        )
        unet = UNetBlocks(max_downsample=int(max_downsample))
        return io.NodeOutput(attach(model, config, (unet, FluxBlocks()), node_id_of(cls)))


def _basic_inputs() -> list[Any]:
    return [
        io.Model.Input(
            "model", tooltip="The model to speed up: SDXL, SD 1.5, SD 2 or Flux.1, as loaded."
        ),
        make_input(
            io.Combo.Input,
            "method",
            options=METHODS,
            default=METHODS[0],
            tooltip="CA-ToMe merges whatever is alike enough and looks for it anew at a few steps "
            "only. ToMe merges a fixed share, looked for anew in every block and step. ToFu is "
            "ToMe with a gentler way of merging.",
        ),
        make_input(
            io.Float.Input,
            "ratio",
            default=_DEFAULTS.ratio,
            min=0.0,
            max=MAX_MATCHED_RATIO,
            step=0.05,
            tooltip="ToMe and ToFu: share of the picture's tokens that is merged away, up to 0.75. "
            "0 switches the node off: the picture is exactly the same as without it. CA-ToMe goes "
            "by threshold instead.",
        ),
        make_input(
            io.Float.Input,
            "threshold",
            default=_MATCHING.threshold,
            min=0.0,
            max=1.0,
            step=0.01,
            tooltip="CA-ToMe: how alike two tokens must be to merge. Lower is faster and loses "
            "more detail; 1 switches the node off. ToMe and ToFu go by ratio instead.",
        ),
        make_input(
            io.String.Input,
            "refresh_steps",
            default=BEST_STEPS,
            tooltip="CA-ToMe: the sampling steps at which alike tokens are looked for anew; what "
            "is found serves from the next step on, so the first one merges nothing. A list such "
            'as "0,8,45-49" (0 is the first step), or "every 5". Steps are counted as in a run of '
            "50 and scaled to yours: in a run of 25 steps, 8 means step 4.",
        ),
        make_input(
            io.Combo.Input,
            "max_downsample",
            options=["1", "2", "4", "8"],
            default=str(MAX_DOWNSAMPLE),
            tooltip="SDXL, SD 1.5 and SD 2: coarsest level of the model that merges; 1 is the size "
            "of the latent, 2 half of it, and so on. SDXL attends at 2 and 4. Flux has one level "
            "only, which always merges.",
        ),
        make_input(
            io.Int.Input,
            "seed",
            default=_MATCHING.seed,
            min=0,
            max=2**64 - 1,
            control_after_generate=False,
            tooltip="Which tokens others may merge into is drawn by chance: another seed draws "
            "others. The same seed gives the same picture every time.",
        ),
    ]


def _advanced_inputs() -> list[Any]:
    return [
        make_input(
            io.Boolean.Input,
            "merge_queries_only",
            default=_DEFAULTS.merge_queries_only,
            advanced=True,
            tooltip="Whether merged tokens still look at the whole picture. Keeps more detail and "
            "saves less time.",
        ),
    ]
