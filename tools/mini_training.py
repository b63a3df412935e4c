"""Flow matching for the mini model: what is learnt, step by step.

`x_t = (1 - t) x_0 + t noise`, the model learns `noise - x_0`, with `t` the sigmoid of a normal
draw. The picture fills the first channels of a 16-channel latent. The other channels stay zero
in training and so do the weights that touch them: ComfyUI starts them as noise, and neither
that noise nor the work of predicting it reaches the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from mini_flux import LATENT_PATCH, FluxShape, Grid, MiniFlux
from mini_pictures import Picture, pixels_of, text_tokens
from mini_sheet import decode, encode
from torch import Tensor

AVERAGING = 0.995  # of the weights that are saved for painting
EMPTY_PROMPTS = 0.1  # share of samples trained without a prompt, for guidance
WARM_UP_STEPS = 50
FALLING_SHARE = 0.4  # of the steps, at the end, over which the learning rate falls to zero
GRADIENT_LIMIT = 1.0


@dataclass(frozen=True)
class Examples:
    """The training pictures as tensors, one row each."""

    latents: Tensor  # (pictures, 16, height, width)
    contexts: Tensor  # (pictures, 8, 64)
    pooled: Tensor  # (pictures, 64)


def examples_of(
    pictures: Sequence[Picture], size: int, fold: int, device: torch.device
) -> Examples:
    """Read `pictures` and their prompts onto `device`."""
    pixels = torch.stack([pixels_of(picture, size) for picture in pictures])
    prompts = [text_tokens(picture.name) for picture in pictures]
    contexts, pooled = (torch.stack(part) for part in zip(*prompts, strict=True))
    return Examples(encode(pixels, fold).to(device), contexts.to(device), pooled.to(device))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """The rate of `step` (from 0) of `steps`: a short rise, level, then falling to zero."""
    rise = min(1.0, (step + 1) / WARM_UP_STEPS)
    fall = min(1.0, (steps - step) / max(1.0, FALLING_SHARE * steps))
    return peak * min(rise, fall)


def silence_padding(model: MiniFlux, channels: int) -> None:
    """Zero the weights that read or write latent channels from `channels` on.

    Their inputs and gradients are zero in training, so the optimiser leaves them at zero.
    """
    first = channels * LATENT_PATCH**2
    with torch.no_grad():
        model.img_in.weight[:, first:] = 0
        model.final_layer.linear.weight[first:] = 0
        model.final_layer.linear.bias[first:] = 0


def halve_tokens(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights for tokens of 2x2 pixels from those of a model with tokens of 4x4.

    The new model does to a picture what the old one does to the picture drawn twice as large.
    """

    def halve(per_token: Tensor) -> Tensor:  # (any, 64), mean over each 2x2 pixels
        pixels = decode(F.pixel_shuffle(per_token[..., None, None], LATENT_PATCH), fold=2)
        latent = encode(F.avg_pool2d(pixels, 2), fold=1)
        return F.pixel_unshuffle(latent, LATENT_PATCH).flatten(1)

    last = "final_layer.linear."
    return {
        **weights,
        "img_in.weight": 4 * halve(weights["img_in.weight"]),  # a pixel stands for four
        last + "weight": halve(weights[last + "weight"].T).T.contiguous(),
        last + "bias": halve(weights[last + "bias"][None])[0],
    }


def part_of_grid(rows: int, columns: int, window: int, generator: torch.Generator) -> Grid:
    """A random `window` x `window` part of the token grid: neighbours, or evenly spread tokens.

    Neighbours teach texture and spread tokens composition, both at their true positions, for the
    price of `window`^2 tokens. A side of at most `window` tokens is taken whole.
    """
    spread = bool(torch.randint(2, (), generator=generator))

    def part(side: int) -> range:
        if side <= window:
            return range(side)
        stride = side // window if spread else 1
        first = int(torch.randint(side - stride * (window - 1), (), generator=generator))
        return range(first, first + stride * window, stride)

    return part(rows), part(columns)


def take(latents: Tensor, grid: Grid) -> Tensor:
    """The latent positions of the tokens of `grid`: `(batch, channels, 2 * rows, 2 * columns)`."""
    rows, columns = (
        [LATENT_PATCH * token + place for token in line for place in range(LATENT_PATCH)]
        for line in grid
    )
    return latents[:, :, rows][..., columns]


def batch_loss(
    model: MiniFlux,
    examples: Examples,
    batch: int,
    channels: int,
    window: int,
    generator: torch.Generator,
) -> Tensor:
    """Mean squared error of the velocity over the picture channels of one random batch.

    `window` is the largest number of tokens a side (see `part_of_grid`), 0 for all.
    """
    device = examples.latents.device
    rows, columns = (side // LATENT_PATCH for side in examples.latents.shape[-2:])
    grid = part_of_grid(rows, columns, window or max(rows, columns), generator)
    # drawn on the CPU: a run on a GPU sees the same batches
    picks = torch.randint(len(examples.latents), (batch,), generator=generator).to(device)
    times = torch.sigmoid(torch.randn(batch, generator=generator)).to(device)
    kept = (torch.rand(batch, generator=generator) >= EMPTY_PROMPTS).float().to(device)
    latents = take(examples.latents[picks], grid)
    noise = torch.randn(batch, channels, *latents.shape[-2:], generator=generator).to(device)
    noise = F.pad(noise, (0, 0, 0, 0, 0, latents.shape[1] - channels))
    mixed = torch.lerp(latents, noise, times[:, None, None, None])
    contexts = examples.contexts[picks] * kept[:, None, None]
    velocity = model(mixed, times, contexts, examples.pooled[picks] * kept[:, None], grid)
    return F.mse_loss(velocity.float()[:, :channels], (noise - latents)[:, :channels])


class Training:
    """Model, its running average and the optimiser at one step."""

    def __init__(self, shape: FluxShape, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = MiniFlux(shape).to(device)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.99), weight_decay=0.01
        )
        self.step = 0

    def advance(self, loss_of: Callable[[MiniFlux], Tensor], rate: float) -> Tensor:
        """One step of the optimiser at learning rate `rate`; returns the loss, detached."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad()
        loss = loss_of(self.model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_LIMIT)
        self.optimiser.step()
        self.step += 1
        # a short memory at first: else the random start would fill it for hundreds of steps
        keep = min(AVERAGING, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            pairs = zip(self.average.parameters(), self.model.parameters(), strict=True)
            for average, current in pairs:
                average.lerp_(current, 1 - keep)
        return loss.detach()
