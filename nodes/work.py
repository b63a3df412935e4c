"""Multiply-adds of a model's call, from the shapes of its modules: what merging saves of them.

Only what grows with the picture counts: matrix products, convolutions and attention. Embeddings of
time and prompt, a few per mille, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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


class UNetWork:
    """Counts the work of a UNet.

    Args:
        stages: downsampling and modules of every stage, as the model runs.
        model: the UNet.
    """

    def __init__(self, stages: Iterable[tuple[int, nn.Module]], model: UNetModel) -> None:
        self._per_position: list[tuple[float, int]] = [(1, _weights(model.out))]
        self._blocks: list[tuple[int, nn.Module]] = []
        for downsample, stage in stages:
            for module in stage.children():
                if isinstance(module, SpatialTransformer):
                    around = _weights(module.proj_in) + _weights(module.proj_out)
                    self._per_position.append((downsample, around))
                    self._blocks += [(downsample, block) for block in module.transformer_blocks]
                else:
                    at = downsample / 2 if isinstance(module, Upsample) else downsample
                    self._per_position.append((at, _convolutions(module)))

    def of_call(
        self, size: tuple[int, int], context: int, known: Mapping[nn.Module, Tokens]
    ) -> Work | None:
        """Work of a call; None where another node changed the size of a stage.

        Args:
            size: rows and columns of the latent.
            context: tokens of the prompt.
            known: what blocks worked on, by block; the others ran whole.
        """

        def positions(downsample: float) -> int:
            rows, columns = (-(-side // downsample) for side in size)
            return int(rows * columns)

        around = sum(positions(downsample) * each for downsample, each in self._per_position)
        blocks = [(block, positions(downsample)) for downsample, block in self._blocks]
        return _sum(around, blocks, known, lambda block, each: _unet_block(block, context, each))


class FluxWork:
    """Counts the work of a Flux model."""

    def __init__(self, model: Flux) -> None:
        self._blocks = (*model.double_blocks, *model.single_blocks)

    def of_call(self, tokens: int, text: int, known: Mapping[nn.Module, Tokens]) -> Work | None:
        """Work of a call on ``tokens`` of pictures and ``text`` of the prompt, as above."""
        blocks = [(block, tokens) for block in self._blocks]
        return _sum(0, blocks, known, lambda block, each: _flux_block(block, text, each))


def _sum(
    around: int,
    blocks: list[tuple[nn.Module, int]],
    known: Mapping[nn.Module, Tokens],
    work: Callable[[nn.Module, Tokens], int],
) -> Work | None:
    stock = done = around
    for block, tokens in blocks:
        whole = Tokens.whole(tokens)
        real = known.get(block, whole)
        if real.all != tokens:
            return None
        stock += work(block, whole)
        done += work(block, real)
    return Work(stock, done)


def _unet_block(block: nn.Module, context: int, tokens: Tokens) -> int:
    own, cross = block.attn1, block.attn2
    width = own.to_q.out_features
    work = (_weights(own.to_q) + _weights(own.to_out)) * tokens.queries
    work += (_weights(own.to_k) + _weights(own.to_v)) * tokens.projected
    work += 2 * width * tokens.queries * tokens.keys + _weights(block.ff) * tokens.others
    if cross is not None:
        work += (_weights(cross.to_q) + _weights(cross.to_out)) * tokens.others
        work += (_weights(cross.to_k) + _weights(cross.to_v)) * context
        work += 2 * width * tokens.others * context
    return work


def _flux_block(block: nn.Module, text: int, tokens: Tokens) -> int:
    product = 2 * block.hidden_size * (text + tokens.queries) * (text + tokens.keys)
    if hasattr(block, "linear1"):  # a single one; compiled, it is of another class
        layers = _weights(block.linear1) + _weights(block.linear2)
        return product + layers * (text + tokens.others)
    image = _weights(block.img_attn) + _weights(block.img_mlp)
    return (
        product
        + image * tokens.others
        + (_weights(block.txt_attn) + _weights(block.txt_mlp)) * text
    )


def _weights(module: nn.Module) -> int:
    """Multiply-adds per token or position of the linear layers and convolutions in a module.

    Not the weights' own sizes, which are others where they are quantised.
    """
    total = 0
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            per_output = math.prod(layer.kernel_size) * layer.in_channels // layer.groups
            total += per_output * layer.out_channels
        else:
            total += getattr(layer, "in_features", 0) * getattr(layer, "out_features", 0)
    return total


def _convolutions(module: nn.Module) -> int:
    return sum(_weights(layer) for layer in module.modules() if isinstance(layer, nn.Conv2d))
