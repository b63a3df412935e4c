"""What a double or single block of Flux runs instead of ``forward``, in each scope."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..toma_core.config import Scope
from ..toma_core.detail import Carry
from ..toma_core.plan import MergePlan
from ..toma_core.regions import Grid
from .attention import with_all_keys, with_attention
from .followers import Followers, Keys, merged_ranges
from .options import Call
from .overrides import Original, Override
from .run import Run, Site


class Sequence:
    """What is known of the token sequence of the current call.

    Attributes:
        grids: of the picture and of every reference picture.
        text: number of text tokens.
    """

    grids: tuple[Grid, ...] = ()
    text: int = 0

    def begin(self, grids: tuple[Grid, ...], text: int) -> None:
        self.grids, self.text = grids, text


class FluxBlock(ABC):
    """One block that works on merged picture tokens; double and single blocks differ in little.

    Args:
        block: the block.
        number: its index in the model.
        site: blocks that share the pattern.
        run: settings and report.
        sequence: tokens of the current call.
        followers: of the site.
    """

    kind: str
    parameters: tuple[str, ...]
    """Of ``forward``, in order."""
    tokens: str
    """The parameter that holds the picture tokens."""
    ranges: str
    """The parameter that holds token ranges of the modulation."""

    def __init__(
        self,
        block: nn.Module,
        number: int,
        site: Site,
        run: Run,
        sequence: Sequence,
        followers: Followers,
    ) -> None:
        self._block = block
        self._name = f"{self.kind} {number}"
        self._site = site
        site.blocks.append(block)
        self._run = run
        self._sequence = sequence
        self._follow = followers
        self._forward = Original(block)
        self._originals: dict[str, Original] = {}
        self._carry: Carry | None = None
        self._lead = 0

    def overrides(self, call: Call) -> list[Override]:
        """What the block and its modules run instead of ``forward`` during a call."""
        self._forward.look()
        scope = self._run.config.scope
        if scope is Scope.ATTENTION:
            return [(self._block, self._with_merged_attention)]
        if call.patches.get("attn1_patch") or call.patches.get("attn1_output_patch"):
            self._run.report.aside(
                "another node works inside attention, so only what surrounds it merges", self._name
            )
            return [(self._block, self._with_merged_attention), *self._merged_feed_forward()]
        if scope is Scope.BLOCK:
            return [(self._block, self._merge_block)]
        return [
            (self._block, self._with_merged_modules),
            *self._merged_projections(),
            *self._merged_feed_forward(),
        ]

    # What double and single blocks do not have in common.

    @abstractmethod
    def _text(self, arguments: dict[str, Any]) -> int:
        """Number of text tokens in attention."""

    @abstractmethod
    def _projections(self) -> tuple[nn.Module, nn.Module]:
        """The modules at which picture tokens enter and leave attention."""

    @abstractmethod
    def _merged_feed_forward(self) -> list[Override]:
        """Overrides of a feed-forward that stands by itself."""

    # The three scopes.

    def _merge_block(self, *args: Any, **kwargs: Any) -> Any:
        """The block on merged tokens; its change is unmerged and added."""
        arguments = self._bind(args, kwargs)
        plan, text, lead = self._plan_for(arguments)
        ranges = arguments.get(self.ranges)
        merged_to = None if plan is None or ranges is None else merged_ranges(plan, ranges, lead)
        if plan is not None and ranges is not None and merged_to is None:
            self._run.report.aside("modulation ranges cut through a picture", self._name)
            plan = None
        if plan is None:
            return self._forward(**arguments)
        carry = self._site.carry(self._name, plan)
        if merged_to is not None and not carry.is_whole:
            arguments[self.ranges] = merged_to
        whole = arguments[self.tokens]
        merged = carry.take(whole[:, lead:])
        # A copy even without text: the block adds to its input in place.
        arguments[self.tokens] = torch.cat((whole[:, :lead], merged), 1)
        result = self._forward(**self._followed(arguments, carry, text))
        tokens = result[0] if isinstance(result, tuple) else result
        change = carry.give(tokens[:, lead:] - merged)
        if carry.is_whole:
            return result
        image = whole[:, lead:] + change
        tokens = torch.cat((tokens[:, :lead], image), 1) if lead else image
        return (tokens, *result[1:]) if isinstance(result, tuple) else tokens

    def _with_merged_modules(self, *args: Any, **kwargs: Any) -> Any:
        """The block on whole tokens, its modules on merged ones."""
        arguments = self._bind(args, kwargs)
        plan, text, lead = self._plan_for(arguments)
        if plan is None:
            return self._forward(**arguments)
        carry = self._site.carry(f"{self._name} attention", plan)
        return self._with_carry(carry, lead, self._followed(arguments, carry, text))

    def _with_merged_attention(self, *args: Any, **kwargs: Any) -> Any:
        """The block on whole tokens, its attention product (and feed-forward) on merged ones."""
        arguments = self._bind(args, kwargs)
        plan, text, lead = self._plan_for(arguments)
        if plan is None:
            return self._forward(**arguments)
        carry = self._site.carry(f"{self._name} attention", plan)
        arguments["transformer_options"] = self._attention_options(
            carry, text, arguments.get("transformer_options")
        )
        return self._with_carry(carry, lead, arguments)

    def _with_carry(self, carry: Carry, lead: int, arguments: dict[str, Any]) -> Any:
        self._carry, self._lead = carry, lead
        try:
            return self._forward(**arguments)
        finally:
            self._carry = None

    # Pieces of them.

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, since other nodes may pass them by position."""
        # No zip: torch.compile of torch 2.9 fails at one with ``strict``.
        named = {self.parameters[place]: value for place, value in enumerate(args)}
        return {**named, **kwargs}

    def _plan_for(self, arguments: dict[str, Any]) -> tuple[MergePlan | None, int, int]:
        """The plan, the text tokens in attention, and those that lead the token tensor."""
        text = self._text(arguments)
        tokens = arguments[self.tokens]
        lead = text if self.kind == "single" else 0
        pe, mask = arguments.get("pe"), arguments.get("attn_mask")
        total = text + tokens.shape[1] - lead
        follow_tokens = (pe is None or pe.shape[2] == total) and (
            mask is None or (mask.ndim > 1 and mask.shape[-1] == total)
        )
        if not follow_tokens or not 0 <= lead <= tokens.shape[1]:
            self._run.report.aside("positions or mask do not belong to the tokens", self._name)
            return None, text, lead
        plan = self._site.plan(tokens[:, lead:], self._sequence.grids, self._name)
        return plan, text, lead

    def _followed(self, arguments: dict[str, Any], carry: Carry, text: int) -> dict[str, Any]:
        """The arguments with all that belongs to tokens cut down to those that are left."""
        plan = carry.plan
        options = dict(arguments.get("transformer_options") or {})
        if carry.sees_all_keys:
            options = with_all_keys(options, carry, text)
        keys = Keys.REORDERED if carry.sees_all_keys else Keys.MERGED
        # Cut at whole steps too: the next ones, compiled, find them as they will stay.
        rotary = self._follow.rotary(plan, arguments.get("pe"), text)
        mask = self._follow.mask(plan, arguments.get("attn_mask"), text, keys)
        if carry.is_whole:
            return {**arguments, "transformer_options": options}
        if "img_slice" in options:
            options["img_slice"] = [text, text + plan.merged]
        if "reference_image_num_tokens" in options:
            options["reference_image_num_tokens"] = list(plan.merged_per_grid[1:])
        return {**arguments, "pe": rotary, "attn_mask": mask, "transformer_options": options}

    def _original(self, name: str, module: nn.Module) -> Original:
        original = self._originals.setdefault(name, Original(module))
        original.look()
        return original

    def _merged_projections(self) -> list[Override]:
        enter, leave = self._projections()
        forward_in, forward_out = self._original("in", enter), self._original("out", leave)

        def merge_first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            carry = self._carry
            return forward_in(x if carry is None else carry.take(x, self._lead), *args, **kwargs)

        def unmerge_after(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            carry = self._carry
            y = forward_out(x, *args, **kwargs)
            return y if carry is None else carry.give(y, self._lead)

        return [(enter, merge_first), (leave, unmerge_after)]

    def _attention_options(
        self, carry: Carry, text: int, options: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Options whose attention merges queries, keys and values and unmerges the result."""
        plan = carry.plan
        total = text + plan.tokens
        queries_only = self._run.config.merge_queries_only or carry.sees_all_keys

        def attention(
            run: Callable[..., Tensor],
            q: Tensor,
            k: Tensor,
            v: Tensor,
            heads: int,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            if args or q.shape[2] != total or not kwargs.get("skip_reshape"):
                return run(q, k, v, heads, *args, **kwargs)
            if carry.is_whole:
                return carry.give(run(q, k, v, heads, **kwargs), text)
            # Keys that another node added to are no picture of ours: only queries merge.
            merge_keys = k.shape[2] == total and not queries_only
            keys = Keys.MERGED if merge_keys else Keys.WHOLE
            mask = self._follow.mask(plan, kwargs.get("mask"), text, keys)
            if merge_keys:
                k, v = _merge_heads(plan, k, text), _merge_heads(plan, v, text)
                mask = plan.hide_padding(mask, q.dtype, text)
            kwargs["mask"] = mask
            return carry.give(run(_merge_heads(plan, q, text), k, v, heads, **kwargs), text)

        return with_attention(options, attention)


class DoubleBlock(FluxBlock):
    """A block whose picture and text are separate sequences that attend to one another."""

    kind = "double"
    parameters = (
        *("img", "txt", "vec", "pe", "attn_mask"),
        *("modulation_dims_img", "modulation_dims_txt", "transformer_options"),
    )
    tokens = "img"
    ranges = "modulation_dims_img"

    def _text(self, arguments: dict[str, Any]) -> int:
        self._sequence.text = arguments["txt"].shape[1]
        return self._sequence.text

    def _projections(self) -> tuple[nn.Module, nn.Module]:
        return self._block.img_attn.qkv, self._block.img_attn.proj

    def _merged_feed_forward(self) -> list[Override]:
        forward = self._original("mlp", self._block.img_mlp)

        def feed_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._carry is None:
                return forward(x, *args, **kwargs)
            carry = self._site.carry(f"{self._name} mlp", self._carry.plan)
            return carry.give(forward(carry.take(x), *args, **kwargs))

        return [(self._block.img_mlp, feed_forward)]


class SingleBlock(FluxBlock):
    """A block of one sequence, text first, whose feed-forward shares attention's projections."""

    kind = "single"
    parameters = ("x", "vec", "pe", "attn_mask", "modulation_dims", "transformer_options")
    tokens = "x"
    ranges = "modulation_dims"

    def _text(self, arguments: dict[str, Any]) -> int:
        image = (arguments.get("transformer_options") or {}).get("img_slice")
        return image[0] if image else self._sequence.text

    def _projections(self) -> tuple[nn.Module, nn.Module]:
        return self._block.linear1, self._block.linear2

    def _merged_feed_forward(self) -> list[Override]:
        return []


def _merge_heads(plan: MergePlan, x: Tensor, prefix: int) -> Tensor:
    """Merges ``(batch, heads, tokens, channels)`` along its tokens."""
    heads = x.shape[1]
    merged = plan.merge(x.transpose(1, 2).flatten(2), prefix)
    return merged.unflatten(2, (heads, -1)).transpose(1, 2)
