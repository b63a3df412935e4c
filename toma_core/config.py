"""Settings of a merge: frozen objects, every value checked, the only home of defaults."""

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


class Method(str, Enum):  # noqa: UP042 (StrEnum needs Python 3.11)
    """How it is decided which tokens merge; the values are names for people."""

    TOMA = "ToMA"  # arXiv 2509.10918
    CA_TOME = "CA-ToMe"  # arXiv 2501.00946
    TOME = "ToMe"  # arXiv 2303.17604
    TOFU = "ToFu"  # arXiv 2312.01026


MAX_RATIO = 0.9
MAX_MATCHED_RATIO = 0.75
MAX_TILE_SIZE = 64
MAX_INTERVAL = 100
LISTED_RUN = 50
"""Sampling steps of the run that listed steps are numbered in."""


@dataclass(frozen=True)
class Matching:
    """How tokens are matched in pairs, by the methods that do so instead of ToMA.

    Attributes:
        method: CA-ToMe, ToMe or ToFu.
        threshold: cosine from which CA-ToMe merges a pair, 0 to 1; 1 changes nothing.
        seed: of the private generator that draws destinations.

    Raises:
        ValueError: a value is outside its range; the message names it and the remedy.
    """

    method: Method = Method.CA_TOME
    threshold: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _member(Method, "method", self.method))
        if self.method is Method.TOMA:
            raise ValueError("ToMA matches no pairs. Leave matching out to merge by ToMA.")
        _check_range("threshold", self.threshold, 0.0, 1.0)
        _check_range("seed", self.seed, 0, 2**64 - 1)


@dataclass(frozen=True)
class MergeConfig:
    """How tokens merge.

    Attributes:
        ratio: share of the image tokens that is merged away, 0 to 0.9; 0 changes nothing. ToMe
            and ToFu keep a token of every four, so 0.75 is their limit; CA-ToMe goes by similarity
            instead.
        tile_size: side of a square tile, in tokens.
        region: tiles, stripes of whole rows, or the whole grid.
        scope: the whole block at once, each module by itself, or self-attention alone.
        reuse_interval: sampling steps for which a choice of destinations is kept.
        selection_steps: steps of a run of 50 at which destinations are chosen, scaled to the run;
            empty for every ``reuse_interval`` steps.
        weight_interval: sampling steps for which merge weights are kept.
        keep_detail: blocks run whole at the steps at which destinations are chosen, and what
            merging would lose is kept and added back until the next choice (``detail.py``). The
            last step of a run stays whole too.
        start_percent, end_percent: part of the sampling range in which tokens merge, 0 to 1.
        temperature: tau of the assignment softmax; near 0 every token follows one destination.
        merge_queries_only: in self-attention, keys and values stay whole.
        matching: the method that matches tokens in pairs; None for ToMA.

    Raises:
        ValueError: a value is outside its range; the message names it and the remedy.
    """

    ratio: float = 0.5
    tile_size: int = 8
    region: Region = Region.TILE
    scope: Scope = Scope.BLOCK
    reuse_interval: int = 5
    selection_steps: tuple[int, ...] = ()
    weight_interval: int = 3
    keep_detail: bool = False
    start_percent: float = 0.0
    end_percent: float = 1.0
    temperature: float = 1e-3
    merge_queries_only: bool = False
    matching: Matching | None = None

    def __post_init__(self) -> None:
        _check_range("ratio", self.ratio, 0.0, MAX_RATIO)
        for step in self.selection_steps:
            _check_range("every one of selection_steps", step, 0, LISTED_RUN - 1)
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
        if self.scope is not Scope.ATTENTION and (self.matching or self.merge_queries_only):
            what = self.method.value if self.matching else "merge_queries_only"
            raise ValueError(
                f"{what} works on self-attention alone, got scope {self.scope.value}. "
                "Set scope to attention."
            )
        if self.matching and self.keep_detail:
            raise ValueError(
                f"keep_detail works with ToMA alone, got method {self.method.value}. "
                "Switch keep_detail off."
            )
        if self.matching and self.ratio > MAX_MATCHED_RATIO:
            raise ValueError(
                f"ratio must be at most {MAX_MATCHED_RATIO} with {self.method.value}, which always "
                f"keeps one token of every four, got {self.ratio}. Lower ratio."
            )

    @property
    def method(self) -> Method:
        """How it is decided which tokens merge."""
        return self.matching.method if self.matching else Method.TOMA

    @property
    def weight_steps(self) -> int:
        """Sampling steps for which weights are kept; kept detail belongs to its weights."""
        return self.reuse_interval if self.keep_detail else self.weight_interval

    @property
    def off_setting(self) -> str:
        """Why nothing is ever merged at these settings, in words; empty where tokens merge."""
        if self.matching and self.method is Method.CA_TOME:
            return "threshold is 1" if self.matching.threshold == 1 else ""
        if self.ratio == 0:
            return "ratio is 0"
        if self.keep_detail and self.reuse_interval == 1:
            return "with keep_detail, reuse_interval 1 leaves every step whole"
        return ""

    @property
    def is_identity(self) -> bool:
        """True when nothing is ever merged."""
        return bool(self.off_setting)

    @property
    def blocks_share_patterns(self) -> bool:
        """True where neighbouring blocks use one pattern; matched pairs belong to one block."""
        return self.matching is None


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
