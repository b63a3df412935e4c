"""Multiply-adds of a model's call, from the shapes of its modules: what merging saves of them.

Only what grows with the picture counts: matrix products, convolutions and attention. Embeddings of
time and prompt, a few per mille, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from comfy.ldm.flux.model import Flux
from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel, Upsample
from torch import nn

from ..toma_core.config import MergeConfig, Scope
from ..toma_core.plan import MergePlan


class Work(NamedTuple):
    """Multiply-adds of a call per sample: without merging, and as it was."""

    stock: float
    done: float


class Tokens(NamedTuple):
    """How many picture tokens the parts of a block work on.

    Attributes:
        all: that enter the block.
        queries: of self-attention.
        keys: that it attends to.
        projected: whose keys and values are computed.
        others: in everything else.
    """

    all: int
    queries: int
    keys: int
    projected: int
    others: int

    @classmethod
    def whole(cls, tokens: int) -> Tokens:
        """Of a block that runs whole."""
        return cls(tokens, tokens, tokens, tokens, tokens)

    @classmethod
    def merged(cls, plan: MergePlan, config: MergeConfig) -> Tokens:
        """Of a block that merges by ``plan``."""
        tokens, merged = plan.tokens, plan.merged
        keys = tokens if config.keep_detail or config.merge_queries_only else merged
        if config.scope is Scope.BLOCK:
            return cls(tokens, merged, keys, merged, merged)
        others = tokens if config.scope is Scope.ATTENTION else merged
        return cls(tokens, merged, keys, keys, others)


BlockWork = Callable[[Tokens, int], int]
"""Multiply-adds of a block that works on these tokens and on so many of the prompt."""


class UNetWork:
    """Counts the work of a UNet.

    Args:
        stages: downsampling and modules of every stage, as the model runs.
        model: the UNet.

    Raises:
        AttributeError: when it counts, if modules are of a make that does not tell its shapes.
    """

    def __init__(self, stages: Sequence[tuple[int, nn.Module]], model: UNetModel) -> None:
        self._stages = stages
        self._model = model

    def of_call(
        self, size: tuple[int, int], prompt: int, known: Mapping[nn.Module, Tokens]
    ) -> Work | None:
        """Work of a call; None where another node changed the size of a stage.

        Args:
            size: rows and columns of the latent.
            prompt: tokens of the prompt.
            known: what blocks worked on, by block; the others ran whole.
        """

        def positions(downsample: float) -> int:
            rows, columns = (-(-side // downsample) for side in size)
            return int(rows * columns)

        around = sum(positions(downsample) * each for downsample, each in self._around)
        blocks = [(block, work, positions(down)) for down, block, work in self._blocks]
        return _sum(around, blocks, prompt, known)

    @cached_property
    def _around(self) -> list[tuple[float, int]]:
        """Multiply-adds per position of all that is no transformer block, and where it works."""
        found: list[tuple[float, int]] = [(1, _weights(self._model.out))]
        for downsample, stage in self._stages:
            for module in stage.children():
                if isinstance(module, SpatialTransformer):
                    found.append((downsample, _weights(module.proj_in, module.proj_out)))
                else:
                    layers = [each for each in module.modules() if isinstance(each, nn.Conv2d)]
                    at = downsample / 2 if isinstance(module, Upsample) else downsample
                    found.append((at, sum(map(_weights, layers))))
        return found

    @cached_property
    def _blocks(self) -> list[tuple[int, nn.Module, BlockWork]]:
        return [
            (downsample, block, _unet_block(block))
            for downsample, stage in self._stages
            for module in stage.children()
            if isinstance(module, SpatialTransformer)
            for block in module.transformer_blocks
        ]


class FluxWork:
    """Counts the work of a Flux model, as ``UNetWork`` does."""

    def __init__(self, model: Flux) -> None:
        self._model = model

    def of_call(self, tokens: int, prompt: int, known: Mapping[nn.Module, Tokens]) -> Work | None:
        """Work of a call on ``tokens`` of pictures; None where blocks worked on others."""
        return _sum(0, [(block, work, tokens) for block, work in self._blocks], prompt, known)

    @cached_property
    def _blocks(self) -> list[tuple[nn.Module, BlockWork]]:
        blocks = (*self._model.double_blocks, *self._model.single_blocks)
        return [(block, _flux_block(block)) for block in blocks]


def _sum(
    around: int,
    blocks: list[tuple[nn.Module, BlockWork, int]],
    prompt: int,
    known: Mapping[nn.Module, Tokens],
) -> Work | None:
    stock = done = around
    for block, work, tokens in blocks:
        whole = Tokens.whole(tokens)
        real = known.get(block, whole)
        if real.all != tokens:
            return None
        stock += work(whole, prompt)
        done += work(real, prompt)
    return Work(stock, done)


def _unet_block(block: nn.Module) -> BlockWork:
    own, cross = block.attn1, block.attn2
    width = own.to_q.out_features
    queries = _weights(own.to_q, own.to_out)
    projected = _weights(own.to_k, own.to_v)
    others = _weights(block.ff)
    prompts = 0
    if cross is not None:
        others += _weights(cross.to_q, cross.to_out)
        prompts = _weights(cross.to_k, cross.to_v)

    def work(tokens: Tokens, prompt: int) -> int:
        product = 2 * width * tokens.queries * tokens.keys
        if cross is not None:
            product += 2 * width * tokens.others * prompt
        linear = queries * tokens.queries + projected * tokens.projected + others * tokens.others
        return product + linear + prompts * prompt

    return work


def _flux_block(block: nn.Module) -> BlockWork:
    if hasattr(block, "linear1"):  # a single one; compiled, it is of another class
        pictures = prompts = _weights(block.linear1, block.linear2)
    else:
        pictures = _weights(block.img_attn, block.img_mlp)
        prompts = _weights(block.txt_attn, block.txt_mlp)

    def work(tokens: Tokens, prompt: int) -> int:
        product = 2 * block.hidden_size * (prompt + tokens.queries) * (prompt + tokens.keys)
        return product + pictures * tokens.others + prompts * prompt

    return work


def _weights(*modules: nn.Module) -> int:
    """Multiply-adds per token or position of the linear layers and convolutions in modules.

    Not the weights' own sizes, which are others where they are quantised.
    """
    total = 0
    for module in modules:
        layers = [_of_layer(layer) for layer in module.modules()]
        if not any(layers):
            raise AttributeError(f"a {type(module).__name__} does not tell its shapes")
        total += sum(layers)
    return total


def _of_layer(layer: nn.Module) -> int:
    if isinstance(layer, nn.Conv2d):
        per_output = math.prod(layer.kernel_size) * layer.in_channels // layer.groups
        return per_output * layer.out_channels
    return getattr(layer, "in_features", 0) * getattr(layer, "out_features", 0)
