"""Sends tokens that know where they are through the real hosts.

Every token carries the number of its region in binary, a sign per bit. The real blocks run with
stand-ins for their weights that pass tokens on unchanged, so all that a block does to tokens is
what the host does: merge and unmerge. Weights of a merge are never negative and sum to one, so a
mean of signs is one of the signs again only if every token behind it has that sign: a token that
leaves a block with its own number intact was mixed with tokens of its own region alone.

The model around the blocks is real too, but without values (torch's meta device): its shapes say
which grid a block truly works on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import comfy.ldm.flux.layers
import comfy.supported_models
import tiny
import torch
from comfy.ldm.modules.attention import BasicTransformerBlock, SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock
from comfy.patcher_extension import WrappersMP
from comfyui_toma.nodes.attach import attach, open_run
from comfyui_toma.nodes.overrides import overriding
from comfyui_toma.toma_core.config import MergeConfig
from comfyui_toma.toma_core.regions import RegionLayout, build_layout
from torch import Tensor

Grid = tuple[int, int]
BITS = 16
FEATURES = 8
WIDTH = 32
"""Channels of a token: features that tell tokens apart, then the bits, then nothing."""
TEXT = 3


@functools.lru_cache(maxsize=16)
def layout_of(grids: tuple[Grid, ...], config: MergeConfig) -> RegionLayout:
    return build_layout(grids, config)


def true_regions(grids: tuple[Grid, ...], config: MergeConfig) -> Tensor:
    """``(tokens,)`` region of every token, each proven to be one rectangle of one true grid."""
    layout = layout_of(grids, config)
    region = torch.full((sum(rows * columns for rows, columns in grids),), -1)
    owner = torch.cat([torch.full((r * c,), i) for i, (r, c) in enumerate(grids)])
    row = torch.cat([torch.arange(r).repeat_interleave(c) for r, c in grids])
    column = torch.cat([torch.arange(c).repeat(r) for r, c in grids])
    for number, (index, valid) in enumerate(zip(layout.index, layout.valid, strict=True)):
        tokens = index[valid]
        rows, columns = row[tokens].unique(), column[tokens].unique()
        assert len(owner[tokens].unique()) == 1, "a region spans two pictures"
        assert len(tokens) == len(rows) * len(columns), "a region is no rectangle"
        assert rows[-1] - rows[0] == len(rows) - 1 and columns[-1] - columns[0] == len(columns) - 1
        assert (region[tokens] == -1).all(), "a token is in two regions"
        if config.region == "tile":
            assert max(len(rows), len(columns)) <= config.tile_size
        elif config.region == "stripe":
            assert len(columns) == grids[int(owner[tokens[0]])][1]
        region[tokens] = number
    assert (region >= 0).all(), "a token is in no region"
    return region


@functools.lru_cache(maxsize=16)
def placed_tokens(grids: tuple[Grid, ...], config: MergeConfig) -> Tensor:
    """``(1, tokens, WIDTH)`` tokens that carry the number of their region; to be read only."""
    bits = _signs(true_regions(grids, config))
    generator = torch.Generator().manual_seed(len(bits))
    features = 4 * torch.randn(len(bits), FEATURES, generator=generator)
    rest = torch.zeros(len(bits), WIDTH - FEATURES - BITS)
    return torch.cat((features, bits, rest), 1)[None]


def _signs(region: Tensor) -> Tensor:
    assert int(region.max()) < 2**BITS
    return ((region[:, None] >> torch.arange(BITS)) & 1).float() * 2 - 1


def bits_of(tokens: Tensor) -> Tensor:
    return tokens[..., FEATURES : FEATURES + BITS]


@dataclass
class Seen:
    """What happened at the blocks of one call.

    Attributes:
        grids: true grid of every block that was called, by name.
        merged: blocks of which some module worked on fewer tokens.
        problems: where a token met one of another region, or lengths did not fit.
    """

    grids: dict[str, tuple[Grid, ...]] = field(default_factory=dict)
    merged: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def length(self, block: str, tokens: int, whole: int, left: int) -> None:
        """A module of ``block`` works on ``tokens``: all of them, or exactly those left."""
        if tokens == left != whole:
            self.merged.add(block)
        elif tokens != whole:
            self.problems.append(f"{block}: {tokens} tokens, neither {whole} nor {left}")


def _keep(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


class PlacedUNet:
    """A UNet with attention at all three levels, whose blocks get tokens that know their place."""

    def __init__(self) -> None:
        config = tiny.sdxl_config(
            model_channels=64,
            channel_mult=[1, 1, 1],
            num_res_blocks=[1, 1, 1],
            transformer_depth=[1, 1, 1],
            transformer_depth_middle=1,
            transformer_depth_output=[0, 1, 0, 1, 0, 1],
            dtype=torch.float32,
        )
        self.model = _on_meta(comfy.supported_models.SDXL(config))
        self.channels = 4
        self.arguments = {
            "c_crossattn": torch.empty(1, TEXT, tiny.CONTEXT, device="meta"),
            "y": torch.empty(1, tiny.POOLED + 6 * 256, device="meta"),
        }

    @contextmanager
    def stand_ins(self, config: MergeConfig, seen: Seen) -> Iterator[None]:
        """Weights that pass tokens on, for as long as the context is open."""
        overrides: list[Any] = []
        self._spatial: list[tuple[str, BasicTransformerBlock]] = []
        self._config, self._seen = config, seen
        handles = []
        for name, module in self.model.model.diffusion_model.named_modules():
            if isinstance(module, ResBlock):
                overrides.append((module, self._same_size(module)))
            elif isinstance(module, SpatialTransformer):
                block = module.transformer_blocks[0]
                self._spatial.append((name, block))
                overrides += self._pass_on(name, block)
                handles.append(module.register_forward_pre_hook(self._note_grid(name)))
        try:
            with overriding(overrides):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def entrances(self) -> list[tuple[Any, Callable]]:
        """The blocks as they stand now, with true tokens put in place of those without values."""
        return [(block, self._enter(name, block.forward)) for name, block in self._spatial]

    def _same_size(self, module: ResBlock) -> Callable:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return x.new_empty(x.shape[0], module.out_channels, *x.shape[2:])

        return forward

    def _note_grid(self, name: str) -> Callable:
        def note(_: Any, inputs: tuple) -> None:
            self._seen.grids[name] = (tuple(inputs[0].shape[-2:]),)

        return note

    def _enter(self, name: str, forward: Callable) -> Callable:
        def enter(x: Tensor, **kwargs: Any) -> Tensor:
            grids = self._seen.grids[name]
            tokens = placed_tokens(grids, self._config)
            self._left = layout_of(grids, self._config).merged
            self._whole = tokens.shape[1]
            text = torch.zeros(1, TEXT, WIDTH)
            out = forward(tokens.clone(), **{**kwargs, "context": text})
            # Each of self-attention, cross-attention and feed-forward doubles a token.
            _check(self._seen, name, tokens, out, 8)
            return x

        return enter

    def _pass_on(self, name: str, block: BasicTransformerBlock) -> list[tuple[Any, Callable]]:
        def self_attention(x: Tensor, context: Any = None, value: Any = None, **_: Any) -> Tensor:
            self._seen.length(name, x.shape[1], self._whole, self._left)
            for other in (context, value):
                if other is not None and other.shape[1] != x.shape[1]:
                    self._seen.problems.append(f"{name}: query {x.shape}, key {other.shape}")
            return x

        def cross_attention(x: Tensor, context: Any = None, value: Any = None, **_: Any) -> Tensor:
            if context.shape[1] != TEXT:
                self._seen.problems.append(f"{name}: text of {context.shape[1]} tokens")
            self._seen.length(name, x.shape[1], self._whole, self._left)
            return x

        return [
            *((norm, _keep) for norm in (block.norm1, block.norm2, block.norm3)),
            (block.attn1, self_attention),
            (block.attn2, cross_attention),
            (block.ff, _keep),
        ]


class PlacedFlux:
    """A Flux of one double and one single block that get tokens that know their place."""

    def __init__(self) -> None:
        config = tiny.flux_config(
            hidden_size=WIDTH, axes_dim=[8, 12, 12], depth=1, depth_single_blocks=1
        )
        config.unet_config["dtype"] = torch.float32
        self.model = _on_meta(config)
        self.channels = 16
        self.arguments = {
            "c_crossattn": torch.empty(1, TEXT, tiny.CONTEXT, device="meta"),
            "y": torch.empty(1, tiny.FLUX_POOLED, device="meta"),
        }

    @contextmanager
    def stand_ins(self, config: MergeConfig, seen: Seen) -> Iterator[None]:
        """Weights that pass tokens on, for as long as the context is open."""
        self._config, self._seen = config, seen
        modulation = SimpleNamespace(
            shift=torch.zeros(1, 1, 1), scale=torch.zeros(1, 1, 1), gate=torch.ones(1, 1, 1)
        )

        def modulate(_: Any) -> tuple:
            return modulation, modulation

        def triple(x: Tensor) -> Tensor:
            return torch.cat((x, x, x), -1)

        def enter_single(x: Tensor) -> Tensor:
            return torch.cat((triple(x), x.new_zeros(*x.shape[:2], 4 * WIDTH)), -1)

        def leave_single(x: Tensor) -> Tensor:
            return x[..., :WIDTH]

        def no_norm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return q, k

        model = self.model.model.diffusion_model
        double, single = model.double_blocks[0], model.single_blocks[0]
        overrides = [
            (single.modulation, modulate),
            (single.pre_norm, _keep),
            (single.linear1, enter_single),
            (single.norm, no_norm),
            (single.linear2, leave_single),
        ]
        for side in ("img", "txt"):
            part = {name: getattr(double, f"{side}_{name}") for name in ("mod", "attn", "mlp")}
            overrides += [
                (part["mod"], modulate),
                (getattr(double, f"{side}_norm1"), _keep),
                (getattr(double, f"{side}_norm2"), _keep),
                (part["attn"].qkv, triple),
                (part["attn"].norm, no_norm),
                (part["attn"].proj, _keep),
                (part["mlp"], _keep),
            ]
        layers = comfy.ldm.flux.layers
        stock_attention = layers.attention

        def attention(
            q: Tensor, k: Tensor, v: Tensor, pe: Any, mask: Any = None, **kwargs: Any
        ) -> Tensor:
            self._check_positions(q, k, v, pe)
            return stock_attention(q, k, v, None, mask=mask, **kwargs)

        layers.attention = attention
        try:
            with overriding(overrides):
                yield
        finally:
            layers.attention = stock_attention

    def entrances(self) -> list[tuple[Any, Callable]]:
        """The blocks as they stand now, with true tokens put in place of those without values."""
        model = self.model.model.diffusion_model
        double, single = model.double_blocks[0], model.single_blocks[0]
        return [
            (double, self._enter_double(double.forward)),
            (single, self._enter_single(single.forward)),
        ]

    def _begin(self, name: str, tokens: int) -> tuple[Tensor, dict[str, Any]]:
        """Tokens, and what goes with them: the rotary rows tell regions too."""
        self._name = name
        grids = self._seen.grids["sequence"]
        placed = placed_tokens(grids, self._config)
        self._whole, self._left = placed.shape[1], layout_of(grids, self._config).merged
        if tokens != self._whole:
            self._seen.problems.append(f"{name}: {tokens} tokens, the grids hold {self._whole}")
        pe = torch.zeros(1, 1, TEXT + self._whole, WIDTH // 2, 2, 2)
        pe[0, 0, TEXT:, :, 0, 0] = bits_of(placed)[0]
        return placed, {"pe": pe}

    def _enter_double(self, forward: Callable) -> Callable:
        def enter(**kwargs: Any) -> tuple[Tensor, Tensor]:
            placed, own = self._begin("double", kwargs["img"].shape[1])
            text = torch.zeros(1, TEXT, WIDTH)
            options = self._options(kwargs["transformer_options"])
            arguments = {**kwargs, **own, "txt": text, "transformer_options": options}
            img, txt = forward(**{**arguments, "img": placed.clone()})
            # Attention and feed-forward each double a token.
            _check(self._seen, "double", placed, img, 4)
            if txt.shape != text.shape or txt.any():
                self._seen.problems.append("double: text changed")
            return kwargs["img"], kwargs["txt"]

        return enter

    def _enter_single(self, forward: Callable) -> Callable:
        def enter(x: Tensor, **kwargs: Any) -> Tensor:
            placed, own = self._begin("single", x.shape[1] - TEXT)
            sequence = torch.cat((torch.zeros(1, TEXT, WIDTH), placed), 1)
            options = self._options(kwargs["transformer_options"])
            out = forward(sequence, **{**kwargs, **own, "transformer_options": options})
            _check(self._seen, "single", placed, out[:, TEXT:], 2)
            if out[:, :TEXT].any():
                self._seen.problems.append("single: text changed")
            return x

        return enter

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        def values_as_they_are(
            _: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, **__: Any
        ) -> Tensor:
            """An attention in which every token attends to itself."""
            self._seen.length(self._name, q.shape[2] - TEXT, self._whole, self._left)
            if not q.shape == k.shape == v.shape:
                self._seen.problems.append(f"{self._name}: {q.shape}, {k.shape}, {v.shape}")
            return v.transpose(1, 2).flatten(2)

        return {**options, "optimized_attention_override": values_as_they_are}

    def _check_positions(self, q: Tensor, k: Tensor, v: Tensor, pe: Tensor) -> None:
        """Every token in attention has the rotary row of a token of its own region."""
        if not q.shape[2] == k.shape[2] == v.shape[2] == pe.shape[2]:
            self._seen.problems.append(f"{self._name}: {q.shape[2]} tokens, {pe.shape[2]} rows")
        elif not torch.allclose(bits_of(q)[:, 0], pe[:, 0, :, :, 0, 0], atol=1e-3):
            self._seen.problems.append(f"{self._name}: a rotary row of another region")


def _check(seen: Seen, name: str, tokens: Tensor, out: Tensor, factor: int) -> None:
    if out.shape != tokens.shape:
        seen.problems.append(f"{name}: {tuple(tokens.shape)} became {tuple(out.shape)}")
    elif not torch.allclose(bits_of(out) / factor, bits_of(tokens), atol=1e-3):
        seen.problems.append(f"{name}: a token was mixed with one of another region")


def _on_meta(config: Any) -> Any:
    model = config.get_model({}, "", device=torch.device("meta"))
    model.model_sampling.to("meta")
    return tiny.wrap(model)


def call(
    placed: PlacedUNet | PlacedFlux,
    config: MergeConfig,
    size: Grid,
    neighbour: Callable[[Any], Any] = lambda model: model,
    references: tuple[Grid, ...] = (),
) -> Seen:
    """One call of the model at a latent of ``size`` (rows, columns), merging by ``config``.

    Args:
        placed: the model.
        config: of our node.
        size: of the latent.
        neighbour: another node, between the loader and ours.
        references: latent sizes of reference pictures (Flux Kontext).
    """
    seen = Seen()
    patched = attach(neighbour(placed.model), config)
    sigmas = torch.tensor([1.0, 0.5, 0.0])
    arguments = dict(placed.arguments)
    if isinstance(placed, PlacedFlux):
        sizes = [size, *references]
        # Flux pads odd sides: half a token counts as one.
        seen.grids["sequence"] = tuple((-(-rows // 2), -(-columns // 2)) for rows, columns in sizes)
        if references:
            arguments["ref_latents"] = [torch.empty(1, 16, *s, device="meta") for s in references]
    x = torch.empty(1, placed.channels, *size, device="meta")

    def innermost(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with overriding(placed.entrances()):
            return executor(*args, **kwargs)

    with placed.stand_ins(config, seen):
        run, options = open_run(patched, patched.model_options, sigmas, size)
        transformer_options = {
            **options["transformer_options"],
            "sigmas": sigmas[:1],
            "sample_sigmas": sigmas,
            "cond_or_uncond": [0],
            "uuids": ["condition"],
        }
        transformer_options["wrappers"][WrappersMP.DIFFUSION_MODEL] = {"places": [innermost]}
        with torch.no_grad():
            patched.model.apply_model(
                x, sigmas[:1].to("meta"), transformer_options=transformer_options, **arguments
            )
        run.close()
    return seen
