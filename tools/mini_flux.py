"""A Flux transformer that can be trained, in the key layout that ComfyUI loads.

ComfyUI's own Flux blocks add to their inputs in place, which autograd forbids. This is the
same function without that: double blocks (text and picture apart but for attention), single
blocks (both in one sequence), rotary positions and modulation by time and pooled text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_WIDTH = 128
POSITION_AXES = (16, 56, 56)  # rotary channels for index, row and column; together a head
ROTARY_BASE = 10000.0
TIME_CHANNELS = 256
TIME_PERIOD = 10000.0
LATENT_PATCH = 2  # a Flux token is 2x2 latent positions; ComfyUI's detection fixes it
NORM_EPSILON = 1e-6

Grid = tuple[range, range]  # the numbers of the token rows and columns that are there
Rotary = tuple[Tensor, Tensor]  # cosine and sine `(tokens, 64)` of each pair of channels


@dataclass(frozen=True)
class FluxShape:
    """The sizes that tell one Flux-class model from another."""

    channels: int = 16
    hidden: int = 256
    context: int = 64
    pooled: int = 64
    double_blocks: int = 2
    single_blocks: int = 4

    def __post_init__(self) -> None:
        if self.hidden % HEAD_WIDTH:
            raise ValueError(
                f"hidden must be a multiple of {HEAD_WIDTH} (the width of a head), "
                f"got {self.hidden}: choose 256 or 384"
            )

    @classmethod
    def of(cls, weights: dict[str, Tensor]) -> FluxShape:
        """Read the sizes from `weights` as ComfyUI's detection does."""

        def count(prefix: str) -> int:
            return len({key.split(".")[1] for key in weights if key.startswith(prefix)})

        hidden, token_channels = weights["img_in.weight"].shape
        return cls(
            channels=token_channels // LATENT_PATCH**2,
            hidden=hidden,
            context=weights["txt_in.weight"].shape[1],
            pooled=weights["vector_in.in_layer.weight"].shape[1],
            double_blocks=count("double_blocks."),
            single_blocks=count("single_blocks."),
        )


def time_waves(times: Tensor) -> Tensor:
    """Sines and cosines `(batch, 256)` of `times` `(batch,)` in 0..1, in thousandths."""
    half = TIME_CHANNELS // 2
    falling = torch.arange(half, dtype=torch.float32, device=times.device) / half
    angles = 1000.0 * times.float()[:, None] * torch.exp(-math.log(TIME_PERIOD) * falling)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotary(text_tokens: int, grid: Grid, device: torch.device) -> Rotary:
    """Positions of the sequence: text at the origin, then the picture row by row."""
    rows, columns = grid
    tokens = text_tokens + len(rows) * len(columns)
    positions = torch.zeros(tokens, len(POSITION_AXES), dtype=torch.float64)
    positions[text_tokens:, 1] = torch.tensor(rows).repeat_interleave(len(columns))
    positions[text_tokens:, 2] = torch.tensor(columns).repeat(len(rows))
    parts = []
    for axis, width in enumerate(POSITION_AXES):
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        parts.append(positions[:, axis, None] * ROTARY_BASE**-exponents)
    angles = torch.cat(parts, dim=-1)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(heads: Tensor, angles: Rotary) -> Tensor:
    """Turn each pair of channels of `heads` `(batch, heads, tokens, 128)` by its angle."""
    even, odd = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = angles
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    return turned.flatten(-2).to(heads.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, angles: Rotary) -> Tensor:
    """Attention over `(batch, heads, tokens, 128)` with rotary positions, heads joined."""
    joined = F.scaled_dot_product_attention(rotate(query, angles), rotate(key, angles), value)
    return joined.transpose(1, 2).flatten(2)


def modulated(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm without weights of its own, then `(1 + scale) * x + shift`."""
    normed = F.layer_norm(tokens, tokens.shape[-1:], eps=NORM_EPSILON)
    return (1 + scale) * normed + shift


class HeadNorm(nn.Module):
    """RMS norm; its weight is named `scale`, the name that every ComfyUI since Flux knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HEAD_WIDTH))

    def forward(self, heads: Tensor) -> Tensor:
        # float32: under autocast the mean of squares of a bf16 head loses three digits
        return F.rms_norm(heads.float(), (HEAD_WIDTH,), self.scale, NORM_EPSILON).to(heads.dtype)


class QueryKeyNorm(nn.Module):
    """Splits the packed projection into heads and norms queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query_norm = HeadNorm()
        self.key_norm = HeadNorm()

    def forward(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(batch, tokens, 3 * hidden)` to three of `(batch, heads, tokens, 128)`."""
        query, key, value = packed.unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        return self.query_norm(query), self.key_norm(key), value


class Modulation(nn.Module):
    """Shift, scale and gate per sample; `lin` starts at zero, so a new block starts as identity."""

    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.lin = nn.Linear(hidden, outputs * hidden)
        nn.init.zeros_(self.lin.weight)
        nn.init.zeros_(self.lin.bias)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        return self.lin(F.silu(condition))[:, None].chunk(self.outputs, dim=-1)


class StreamAttention(nn.Module):
    """The weights of one stream's attention; the block runs both streams' heads together."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.norm = QueryKeyNorm()
        self.proj = nn.Linear(hidden, hidden)


def feed_forward(hidden: int) -> nn.Sequential:
    """The MLP of a double block; indices 0 and 2 are its keys."""
    return nn.Sequential(
        nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden)
    )


class DoubleBlock(nn.Module):
    """Text and picture each with weights of their own, one attention over both."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.img_mod, self.txt_mod = Modulation(hidden, 6), Modulation(hidden, 6)
        self.img_attn, self.txt_attn = StreamAttention(hidden), StreamAttention(hidden)
        self.img_mlp, self.txt_mlp = feed_forward(hidden), feed_forward(hidden)

    def forward(
        self, image: Tensor, text: Tensor, condition: Tensor, angles: Rotary
    ) -> tuple[Tensor, Tensor]:
        text_mod, image_mod = self.txt_mod(condition), self.img_mod(condition)
        of_text = self.txt_attn.norm(self.txt_attn.qkv(modulated(text, *text_mod[:2])))
        of_image = self.img_attn.norm(self.img_attn.qkv(modulated(image, *image_mod[:2])))
        query, key, value = (torch.cat(pair, dim=2) for pair in zip(of_text, of_image, strict=True))
        mixed = attention(query, key, value, angles)
        text_mixed, image_mixed = mixed.split((text.shape[1], image.shape[1]), dim=1)
        text = text + text_mod[2] * self.txt_attn.proj(text_mixed)
        image = image + image_mod[2] * self.img_attn.proj(image_mixed)
        text = text + text_mod[5] * self.txt_mlp(modulated(text, *text_mod[3:5]))
        image = image + image_mod[5] * self.img_mlp(modulated(image, *image_mod[3:5]))
        return image, text


class SingleBlock(nn.Module):
    """Attention and MLP side by side on the joined sequence."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.linear1 = nn.Linear(hidden, 7 * hidden)
        self.linear2 = nn.Linear(5 * hidden, hidden)
        self.norm = QueryKeyNorm()
        self.modulation = Modulation(hidden, 3)

    def forward(self, tokens: Tensor, condition: Tensor, angles: Rotary) -> Tensor:
        shift, scale, gate = self.modulation(condition)
        widened = self.linear1(modulated(tokens, shift, scale))
        packed, inner = widened.split((3 * self.hidden, 4 * self.hidden), dim=-1)
        query, key, value = self.norm(packed)
        mixed = attention(query, key, value, angles)
        inner = F.gelu(inner, approximate="tanh")
        return tokens + gate * self.linear2(torch.cat((mixed, inner), dim=-1))


class Embedder(nn.Module):
    """Two linear layers that turn time or pooled text into the condition vector."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(inputs, hidden)
        self.out_layer = nn.Linear(hidden, hidden)

    def forward(self, values: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(values)))


class FinalLayer(nn.Module):
    """Norm, modulation and the projection back; zero at first: a new model predicts zero."""

    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, outputs)
        shift_and_scale = nn.Linear(hidden, 2 * hidden)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), shift_and_scale)
        for layer in (self.linear, shift_and_scale):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition)[:, None].chunk(2, dim=-1)
        return self.linear(modulated(tokens, shift, scale))


class MiniFlux(nn.Module):
    """Flux of the given shape: predicts noise minus picture from their mixture."""

    def __init__(self, shape: FluxShape) -> None:
        super().__init__()
        token_channels = shape.channels * LATENT_PATCH**2
        self.img_in = nn.Linear(token_channels, shape.hidden)
        self.txt_in = nn.Linear(shape.context, shape.hidden)
        self.time_in = Embedder(TIME_CHANNELS, shape.hidden)
        self.vector_in = Embedder(shape.pooled, shape.hidden)
        self.double_blocks = nn.ModuleList(
            DoubleBlock(shape.hidden) for _ in range(shape.double_blocks)
        )
        self.single_blocks = nn.ModuleList(
            SingleBlock(shape.hidden) for _ in range(shape.single_blocks)
        )
        self.final_layer = FinalLayer(shape.hidden, token_channels)

    def forward(
        self,
        latent: Tensor,
        times: Tensor,
        context: Tensor,
        pooled: Tensor,
        grid: Grid | None = None,
    ) -> Tensor:
        """Velocity of `latent`.

        Args:
            latent: `(batch, channels, height, width)`, even sides.
            times: `(batch,)` in 0 (picture) to 1 (noise).
            context: text tokens `(batch, tokens, context)`.
            pooled: `(batch, pooled)`.
            grid: where the token rows and columns of `latent` lie, if it is a part of a latent.

        Returns:
            A tensor of the shape of `latent`.
        """
        rows, columns = (side // LATENT_PATCH for side in latent.shape[-2:])
        image = self.img_in(F.pixel_unshuffle(latent, LATENT_PATCH).flatten(2).transpose(1, 2))
        text = self.txt_in(context)
        condition = self.time_in(time_waves(times)) + self.vector_in(pooled)
        angles = rotary(text.shape[1], grid or (range(rows), range(columns)), latent.device)
        for block in self.double_blocks:
            image, text = block(image, text, condition, angles)
        joined = torch.cat((text, image), dim=1)
        for block in self.single_blocks:
            joined = block(joined, condition, angles)
        velocity = self.final_layer(joined[:, text.shape[1] :], condition)
        channels_first = velocity.transpose(1, 2).unflatten(2, (rows, columns))
        return F.pixel_shuffle(channels_first, LATENT_PATCH)


def current_keys(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the norms of files written for newer ComfyUI (`_norm.weight`) to `_norm.scale`."""
    return {
        key[: -len("weight")] + "scale" if key.endswith("_norm.weight") else key: tensor
        for key, tensor in weights.items()
    }
