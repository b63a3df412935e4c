"""Merging in the transformer blocks of ComfyUI's UNet."""

# SDXL, SD 1.5, SD 2 and every other checkpoint of that class. The blocks are those of
# comfy.ldm.modules.attention; all blocks of one SpatialTransformer work on the same grid and share
# a pattern.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from comfy.ldm.modules.attention import SpatialTransformer, SpatialVideoTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, UNetModel
from torch import Tensor, nn

from ..toma_core.config import Scope
from ..toma_core.detail import Carry
from ..toma_core.plan import MergePlan, Place
from .attention import with_all_keys
from .options import Call
from .overrides import Original, Override
from .run import RESHAPED, Run, Site
from .work import Tokens, UNetWork, Work

PATCH_POINTS = (
    "attn1_patch",
    "attn1_output_patch",
    "attn2_patch",
    "attn2_output_patch",
    "middle_patch",
)
"""Where other nodes reach into a block and expect its tokens whole."""


@dataclass(frozen=True)
class UNetBlocks:
    """Which transformer blocks of a UNet merge.

    Attributes:
        max_downsample: coarsest attention resolution that merges, as latent size / its size.
        input_blocks, middle_block, output_blocks: stages of the UNet that merge.
    """

    max_downsample: int = 8
    input_blocks: bool = True
    middle_block: bool = True
    output_blocks: bool = True

    def include(self, stage: str, downsample: int) -> bool:
        """True for blocks of a stage (input, middle, output) at a resolution."""
        chosen = {
            "input": self.input_blocks,
            "middle": self.middle_block,
            "output": self.output_blocks,
        }
        return chosen[stage] and downsample <= self.max_downsample


def is_image_unet(model: nn.Module) -> bool:
    """True for a UNet whose tokens are those of one picture (no video, no audio)."""
    return (
        isinstance(model, UNetModel)
        and any(isinstance(module, SpatialTransformer) for module in model.modules())
        and not any(isinstance(module, SpatialVideoTransformer) for module in model.modules())
    )


class UNetHost:
    """Merges the transformer blocks of one UNet.

    Args:
        model: the UNet.
        run: that the plans belong to.
        chosen: which blocks merge.
    """

    def __init__(self, model: UNetModel, run: Run, chosen: UNetBlocks) -> None:
        self.sites: list[Site] = []
        self._blocks: list[UNetBlock] = []
        stages = list(_stages(model))
        self._work = UNetWork([(stage.downsample, stage.module) for stage in stages], model)
        found = [
            (stage, module.transformer_blocks)
            for stage in stages
            for module in stage.module
            if isinstance(module, SpatialTransformer)
        ]
        total = sum(len(blocks) for _, blocks in found)
        first = 0
        for stage, blocks in found:
            for depth, block in enumerate(blocks):
                if not chosen.include(stage.name, stage.downsample):
                    continue
                if depth == 0 or not run.config.blocks_share_patterns:
                    self.sites.append(Site(run, Place(first + depth, total)))
                place = (stage.name, stage.number, depth)
                self._blocks.append(UNetBlock(block, place, self.sites[-1], run))
            first += len(blocks)

    def overrides(self, call: Call) -> list[Override]:
        return [override for block in self._blocks for override in block.overrides(call)]

    def work(self, call: Call, known: Mapping[nn.Module, Tokens]) -> Work | None:
        rows, columns = call.arguments["x"].shape[-2:]
        return self._work.of_call((rows, columns), call.prompt_tokens, known)


class UNetBlock:
    """One transformer block that works on merged tokens.

    Args:
        block: the block.
        place: stage, number and depth, as other nodes address it.
        site: blocks that share the pattern.
        run: settings and report.
    """

    def __init__(self, block: nn.Module, place: tuple[str, int, int], site: Site, run: Run) -> None:
        self._block = block
        self._place = place
        self._name = f"{place[0]} {place[1]}.{place[2]}"
        self._site = site
        site.blocks.append(block)
        self._run = run
        self._forward = Original(block)
        self._modules = {
            name: Original(module)
            for name, module in block.named_children()
            if name in ("attn1", "attn2", "ff")
        }
        self._plan: MergePlan | None = None
        self._carry: Carry | None = None

    def overrides(self, call: Call) -> list[Override]:
        """What the block and its modules run instead of ``forward`` during a call."""
        for original in (self._forward, *self._modules.values()):
            original.look()
        scope = self._run.config.scope
        if scope is Scope.ATTENTION and self._is_replaced("attn1", call):
            self._run.report.aside(
                "another node puts its own in place of self-attention, which stays whole there",
                self._name,
            )
            return []
        if scope is Scope.BLOCK and self._is_patched(call):
            self._run.report.aside(
                "other nodes work inside blocks, so these merge module by module", self._name
            )
            scope = Scope.MODULES
        if scope is Scope.BLOCK:
            overrides: list[Override] = [(self._block, self._merge_block)]
            if self._run.config.keep_detail and not self._block.disable_self_attn:
                overrides.append((self._block.attn1, self._attention_to_all_keys))
            return overrides
        overrides = [
            (self._block, self._with_plan),
            (self._block.attn1, self._merged_attention("attn1")),
        ]
        if scope is Scope.MODULES:
            if self._block.attn2 is not None:
                overrides.append((self._block.attn2, self._merged_attention("attn2")))
            overrides.append((self._block.ff, self._merged_feed_forward()))
        return overrides

    def _is_patched(self, call: Call) -> bool:
        return (
            any(call.patches.get(point) for point in PATCH_POINTS)
            or self._is_replaced("attn1", call)
            or self._is_replaced("attn2", call)
        )

    def _is_replaced(self, attention: str, call: Call) -> bool:
        replacements = call.replacements.get(attention) or {}
        return self._place in replacements or self._place[:2] in replacements

    def _plan_for(self, x: Tensor, args: tuple, kwargs: dict[str, Any]) -> MergePlan | None:
        # Passed by name; by position they follow the context.
        options = kwargs.get("transformer_options") or (args[1] if len(args) > 1 else {})
        shape = options.get("activations_shape")
        if shape is None or len(shape) != 4:
            self._run.report.aside("this ComfyUI does not tell the size of the token grid")
            return None
        return self._site.plan(x, ((shape[2], shape[3]),), self._name)

    def _merge_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The block on merged tokens; its change is unmerged and added."""
        plan = self._plan_for(x, args, kwargs)
        if plan is None:
            return self._forward(x, *args, **kwargs)
        self._carry = carry = self._site.carry(self._name, plan)
        try:
            tokens = carry.take(x)
            result = self._forward(tokens, *args, **kwargs)
        finally:
            self._carry = None
        change = carry.give(result - tokens)
        return result if carry.is_whole else x + change

    def _attention_to_all_keys(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Self-attention of a block on merged tokens, which kept the keys of all others."""
        forward = self._modules["attn1"]
        if self._carry is None or kwargs.get("mask") is not None:
            return forward(x, *args, **kwargs)
        options = with_all_keys(kwargs.get("transformer_options"), self._carry)
        return forward(x, *args, **{**kwargs, "transformer_options": options})

    def _with_plan(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The block on whole tokens, with a plan for its modules."""
        self._plan = self._plan_for(x, args, kwargs)
        try:
            return self._forward(x, *args, **kwargs)
        finally:
            self._plan = None

    def _carry_of(self, module: str, x: Tensor) -> Carry | None:
        plan, name = self._plan, f"{self._name} {module}"
        if plan is None:
            return None
        if not plan.fits(x):
            self._run.report.aside(RESHAPED, name)
            return None
        return self._site.carry(name, plan)

    def _merged_attention(self, name: str) -> Any:
        forward = self._modules[name]
        attends_itself = name == "attn1" and not self._block.disable_self_attn
        queries_only = self._run.config.merge_queries_only

        def attention(x: Tensor, context: Any = None, value: Any = None, **kwargs: Any) -> Tensor:
            carry = None if kwargs.get("mask") is not None else self._carry_of(name, x)
            if carry is None:
                return forward(x, context=context, value=value, **kwargs)
            merged = carry.take(x)
            if attends_itself:
                context = x if context is None else context
            keys_merge = attends_itself and not queries_only and not carry.sees_all_keys
            if keys_merge and carry.plan.fits(context):
                # Keys and values of the picture itself merge with the queries; whatever another
                # node put in their place stays whole.
                value = merged if value is x else _merge_if_fits(carry.plan, value)
                context = merged if context is x else carry.plan.merge(context)
                mask = carry.plan.hide_padding(None, merged.dtype)
                kwargs = kwargs if mask is None else {**kwargs, "mask": mask}
            return carry.give(forward(merged, context=context, value=value, **kwargs))

        return attention

    def _merged_feed_forward(self) -> Any:
        forward = self._modules["ff"]

        def feed_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            carry = self._carry_of("ff", x)
            if carry is None:
                return forward(x, *args, **kwargs)
            return carry.give(forward(carry.take(x), *args, **kwargs))

        return feed_forward


def _merge_if_fits(plan: MergePlan, x: Tensor | None) -> Tensor | None:
    return plan.merge(x) if x is not None and plan.fits(x) else x


class _Stage(NamedTuple):
    """A stage of a UNet: its name and number, how much smaller than the latent it works, and it."""

    name: str
    number: int
    downsample: int
    module: nn.Module


def _stages(model: UNetModel) -> Iterator[_Stage]:
    """Every stage, in the order in which the model runs them."""
    downsample = 1
    downsamples = []
    for number, block in enumerate(model.input_blocks):
        if any(isinstance(module, Downsample) for module in block.modules()):
            downsample *= 2
        downsamples.append(downsample)
        yield _Stage("input", number, downsample, block)
    if model.middle_block:
        yield _Stage("middle", 0, downsample, model.middle_block)
    # Output block i takes the skip of input block -1-i, so it works at that one's resolution.
    stages = zip(model.output_blocks, reversed(downsamples), strict=True)
    for number, (block, downsample) in enumerate(stages):
        yield _Stage("output", number, downsample, block)
