"""Settings of a merge: one frozen object, every value checked, the only home of defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Region(str, Enum):  # noqa: UP042 (StrEnum needs Python 3.11)
    """Which tokens may merge with one another (ToMA section 3, locality)."""

    TILE = "tile"
    STRIPE = "stripe"
    GLOBAL = "global"


class Scope(str, Enum):  # noqa: UP042 (StrEnum needs Python 3.11)
    """Which part of a transformer block works on merged tokens."""

    BLOCK = "block"
    MODULES = "modules"
    ATTENTION = "attention"


MAX_RATIO = 0.9
MAX_TILE_SIZE = 64
MAX_INTERVAL = 100


@dataclass(frozen=True)
class MergeConfig:
    """How tokens merge.

    Attributes:
        ratio: share of the image tokens that is merged away, 0 to 0.9; 0 changes nothing.
        tile_size: side of a square tile, in tokens.
        region: tiles, stripes of whole rows, or the whole grid.
        scope: the whole block at once, each module by itself, or self-attention alone.
        reuse_interval: sampling steps for which a choice of destinations is kept.
        weight_interval: sampling steps for which merge weights are kept.
        start_percent, end_percent: part of the sampling range in which tokens merge, 0 to 1.
        temperature: tau of the assignment softmax; near 0 every token follows one destination.

    Raises:
        ValueError: a value is outside its range; the message names it and the remedy.
    """

    ratio: float = 0.5
    tile_size: int = 8
    region: Region = Region.TILE
    scope: Scope = Scope.BLOCK
    reuse_interval: int = 5
    weight_interval: int = 3
    start_percent: float = 0.0
    end_percent: float = 1.0
    temperature: float = 1e-3

    def __post_init__(self) -> None:
        _check_range("ratio", self.ratio, 0.0, MAX_RATIO)
        _check_range("tile_size", self.tile_size, 1, MAX_TILE_SIZE)
        _check_range("reuse_interval", self.reuse_interval, 1, MAX_INTERVAL)
        _check_range("weight_interval", self.weight_interval, 1, MAX_INTERVAL)
        _check_range("start_percent", self.start_percent, 0.0, 1.0)
        _check_range("end_percent", self.end_percent, 0.0, 1.0)
        _check_range("temperature", self.temperature, 1e-4, 10.0)
        if self.start_percent >= self.end_percent:
            raise ValueError(
                f"start_percent must be below end_percent, got {self.start_percent} and "
                f"{self.end_percent}. Lower start_percent or raise end_percent."
            )
        object.__setattr__(self, "region", _member(Region, "region", self.region))
        object.__setattr__(self, "scope", _member(Scope, "scope", self.scope))

    @property
    def is_identity(self) -> bool:
        """True when nothing is ever merged."""
        return self.ratio == 0


def _check_range(name: str, value: float, low: float, high: float) -> None:
    is_whole = isinstance(low, int)
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        kind = "a whole number" if is_whole else "a number"
        raise ValueError(f"{name} must be {kind} from {low} to {high}, got {value!r}.")
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(
            f"{name} must be from {low} to {high}, got {value}. Set it to a value in that range."
        )


def _member(kind: type[Enum], name: str, value: object) -> Enum:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(member.value for member in kind)
        raise ValueError(f"{name} must be one of {choices}, got {value!r}.") from None
