"""What the training scenes show: names of emoji, and backgrounds, flat and busy, by formula."""

from __future__ import annotations

from collections.abc import Callable

import numpy

Grid = numpy.ndarray  # (size, size) in units of the side, 0..1
Colours = numpy.ndarray  # (size, size, 3), 0..255


def _mix(share: Grid, low: tuple[int, int, int], high: tuple[int, int, int]) -> Colours:
    """`low` where `share` is 0, `high` where it is 1."""
    return numpy.array(low) + share.clip(0, 1)[..., None] * (numpy.array(high) - numpy.array(low))


def _sky(x: Grid, y: Grid) -> Colours:
    return _mix(y, (90, 170, 245), (190, 225, 255))


def _night(x: Grid, y: Grid) -> Colours:
    stars = numpy.random.RandomState(0).random_sample((32, 32)) > 0.96  # a stream fixed for good
    there = stars[(32 * y).astype(int), (32 * x).astype(int)]
    return _mix(there.astype(float), (16, 20, 64), (255, 250, 200))


def _bricks(x: Grid, y: Grid) -> Colours:
    row = numpy.floor(8 * y)
    joint = ((8 * y) % 1 < 0.25) | ((4 * x + row % 2 / 2) % 1 < 0.125)
    return _mix(joint.astype(float), (176, 72, 52), (226, 212, 196))


def _grass(x: Grid, y: Grid) -> Colours:
    blades = numpy.sin(2 * numpy.pi * (11 * x + 0.4 * numpy.sin(7 * numpy.pi * y)))
    rows = numpy.sin(2 * numpy.pi * (6 * y + 3 * x))
    return _mix(0.5 + 0.3 * blades + 0.2 * rows, (28, 110, 36), (120, 200, 70))


def _checkers(x: Grid, y: Grid) -> Colours:
    return _mix((numpy.floor(8 * x) + numpy.floor(8 * y)) % 2, (40, 40, 48), (236, 236, 228))


def _waves(x: Grid, y: Grid) -> Colours:
    height = 8 * y + 0.4 * numpy.sin(4 * numpy.pi * x)
    return _mix(0.5 + 0.5 * numpy.sin(2 * numpy.pi * height), (10, 90, 150), (120, 215, 225))


def _stripes(x: Grid, y: Grid) -> Colours:
    return _mix(numpy.floor(8 * x) % 2, (250, 200, 60), (215, 70, 130))


def _sand(x: Grid, y: Grid) -> Colours:
    return _mix((y > 0.6).astype(float), (255, 236, 200), (222, 184, 120))


# what a person names at sight, also when small
SUBJECTS = (
    "birthday cake", "cat face", "cherries", "cow face", "dog face", "doughnut", "frog face",
    "lion face", "monkey face", "mushroom", "octopus", "panda face", "penguin", "rabbit face",
    "red apple", "slice of pizza", "snail", "strawberry", "tiger face", "tropical fish", "turtle",
    "watermelon", "sunflower", "hamburger", "banana",
)  # fmt: skip

BACKGROUNDS: dict[str, Callable[[Grid, Grid], Colours]] = {
    "sky": _sky,
    "night": _night,
    "bricks": _bricks,
    "grass": _grass,
    "checkers": _checkers,
    "waves": _waves,
    "stripes": _stripes,
    "sand": _sand,
}


def background(name: str, size: int) -> numpy.ndarray:
    """The background of that name, `(size, size, 3)` bytes."""
    middles = (numpy.arange(size) + 0.5) / size
    x, y = numpy.meshgrid(middles, middles)
    return BACKGROUNDS[name](x, y).round().astype(numpy.uint8)
