"""How far a picture is from the one without merging. Pictures are `(batch, 3, height, width)`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mini_flux import FluxShape, MiniFlux
from mini_pictures import TEXT_TOKENS, TEXT_WIDTH
from mini_sheet import LATENT_CHANNELS, encode
from torch import Tensor

EQUAL_DB = 100.0
"""PSNR of equal pictures, whose ratio is infinite: above that of any two 8-bit pictures."""

WINDOW, SPREAD = 11, 1.5  # SSIM's Gaussian window, in pixels
STABLE_MEAN, STABLE_CONTRAST = 0.01**2, 0.03**2

FEATURE_TIME = 0.1  # a little noise, as much as the model knows from its last steps


def psnr(reference: Tensor, image: Tensor) -> Tensor:
    """Peak signal-to-noise ratio `10 log10(1 / mean squared error)` in dB of pixels in 0..1.

    Returns:
        `(batch,)`, at most `EQUAL_DB`.
    """
    error = (reference.double() - image.double()).square().mean((1, 2, 3))
    return -10 * error.clamp_min(10 ** (-EQUAL_DB / 10)).log10()


def ssim(reference: Tensor, image: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004, equation 13) of pixels in 0..1.

    A Gaussian window of 11 pixels, 1.5 of them a standard deviation, inside the picture only; the
    mean over windows and colours.

    Returns:
        `(batch,)`, 1 for equal pictures.
    """
    x, y = reference.double(), image.double()
    places = torch.arange(WINDOW, dtype=x.dtype) - WINDOW // 2
    line = torch.exp(-places.square() / (2 * SPREAD**2))
    window = torch.outer(line, line) / line.sum() ** 2

    def blur(picture: Tensor) -> Tensor:
        weight = window.expand(picture.shape[1], 1, -1, -1)
        return F.conv2d(picture, weight, groups=picture.shape[1])

    mean_x, mean_y = blur(x), blur(y)
    variance_x, variance_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    covariance = blur(x * y) - mean_x * mean_y
    likeness = (2 * mean_x * mean_y + STABLE_MEAN) / (mean_x**2 + mean_y**2 + STABLE_MEAN)
    structure = (2 * covariance + STABLE_CONTRAST) / (variance_x + variance_y + STABLE_CONTRAST)
    return (likeness * structure).mean((1, 2, 3))


class FeatureDistance:
    """Distance of two pictures in the features of the mini model itself.

    The features are the image tokens that leave its last double block, for the picture with a tenth
    of one fixed noise and no prompt; the distance is 1 - cosine, the mean over tokens.

    Args:
        weights: of the model, under the keys of `MiniFlux`.
        fold: pixels per latent pixel and side.
    """

    def __init__(self, weights: dict[str, Tensor], fold: int) -> None:
        self._model = MiniFlux(FluxShape.of(weights)).eval()
        self._model.load_state_dict(weights)
        self._fold = fold

    def __call__(self, reference: Tensor, image: Tensor) -> Tensor:
        """`(batch,)`, 0 for equal pictures, of pixels in 0..1."""
        cosine = F.cosine_similarity(self._tokens(reference), self._tokens(image), dim=-1)
        return 1 - cosine.mean(1)

    @torch.no_grad()
    def _tokens(self, pixels: Tensor) -> Tensor:
        """Features `(batch, tokens, hidden)`."""
        latent = encode(2 * pixels - 1, self._fold)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(1, LATENT_CHANNELS, *latent.shape[-2:], generator=generator)
        batch, left = len(latent), []
        hook = self._model.double_blocks[-1].register_forward_hook(
            lambda _block, _inputs, output: left.append(output[0])
        )
        try:
            self._model(
                (1 - FEATURE_TIME) * latent + FEATURE_TIME * noise,
                torch.full((batch,), FEATURE_TIME),
                torch.zeros(batch, TEXT_TOKENS, TEXT_WIDTH),
                torch.zeros(batch, TEXT_WIDTH),
            )
        finally:
            hook.remove()
        return left[0]
