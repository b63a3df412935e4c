"""When a pattern is made anew: pure numbers, from sigmas alone.

Samplers call the model as often per step as they like (Heun twice, guidance nodes once more), so
nothing here counts calls: a step is the place of the current sigma in the run's sigmas.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum

from .config import LISTED_RUN

BEST_STEPS = "0,8,11,13,20,25,30,35,45-49"
"""The best list of CA-ToMe (its second table)."""


def parse_steps(text: str) -> tuple[int, ...]:
    """Steps of a run of 50 from a list such as "0,8,45-49", or from "every 5".

    Raises:
        ValueError: the text is no such list; the message shows the accepted form.
    """
    every = re.fullmatch(r"\s*every\s+(\d+)\s*", text, re.IGNORECASE)
    if every:
        interval = int(every[1])
        if not 1 <= interval < LISTED_RUN:
            raise _no_steps(text, f"every {interval} is not from 1 to {LISTED_RUN - 1}")
        return tuple(range(0, LISTED_RUN, interval))
    steps: set[int] = set()
    for item in text.strip().removesuffix(",").split(","):
        numbers = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item)
        if numbers is None:
            raise _no_steps(text, f'"{item.strip()}" is neither a step nor a range of steps')
        first, last = int(numbers[1]), int(numbers[2] or numbers[1])
        if first > last:
            raise _no_steps(text, f'"{item.strip()}" falls, write it as {last}-{first}')
        if last >= LISTED_RUN:
            raise _no_steps(text, f"{last} is beyond step {LISTED_RUN - 1}")
        steps.update(range(first, last + 1))
    return tuple(sorted(steps))


def _no_steps(text: str, problem: str) -> ValueError:
    return ValueError(
        f'refresh_steps must be steps from 0 to {LISTED_RUN - 1} such as "{BEST_STEPS}", or '
        f'"every 5", got "{text}": {problem}.'
    )


class Action(Enum):
    """What a block does with the pattern that it finds."""

    SELECT = "choose destinations and weights"
    REWEIGHT = "keep destinations, renew weights"
    REUSE = "keep both"


@dataclass(frozen=True)
class Epoch:
    """The span of steps over which a pattern stands: of destinations, and within it of weights."""

    selection: int
    weights: int

    def action(self, held: Epoch | None) -> Action:
        """What to do when a pattern of epoch ``held`` (None: no pattern) is at hand."""
        if held is None or held.selection != self.selection:
            return Action.SELECT
        return Action.REUSE if held == self else Action.REWEIGHT


class Schedule:
    """Maps a sigma of one sampling run to its epoch.

    Args:
        sigmas: the run's sigmas in sampling order, the final one included; empty when unknown,
            then each new sigma counts as a step.
        start_sigma, end_sigma: tokens merge where ``end_sigma < sigma <= start_sigma``.
        reuse_interval, weight_interval: steps per choice of destinations and of weights.
        selection_steps: steps of a run of 50 at which destinations are chosen, instead of by
            interval; scaled to the run where it has known sigmas. The first step that merges
            chooses in any case.
        spares_last: no tokens merge in the last step of a run of known sigmas. What it paints is
            final: no later step mends it.
    """

    def __init__(
        self,
        sigmas: tuple[float, ...],
        start_sigma: float,
        end_sigma: float,
        reuse_interval: int,
        weight_interval: int,
        selection_steps: tuple[int, ...] = (),
        spares_last: bool = False,
    ) -> None:
        # The last sigma is where sampling ends: no step starts there.
        self._sigmas = sigmas[:-1]
        self._seen: list[float] = []
        self._start_sigma = start_sigma
        self._end_sigma = end_sigma
        self._spares_last = spares_last
        self._reuse_interval = reuse_interval
        self._weight_interval = weight_interval
        steps = len(self._sigmas) or LISTED_RUN
        self._selection_steps = sorted({step * steps // LISTED_RUN for step in selection_steps})
        active = [step for step, sigma in enumerate(self._sigmas) if self.is_active(sigma)]
        self._first = active[0] if active else 0

    def is_active(self, sigma: float) -> bool:
        return self._end_sigma < sigma <= self._start_sigma

    def step(self, sigma: float) -> int:
        """The step nearest to ``sigma``; the earlier one where two are equally near."""
        if self._sigmas:
            steps = range(len(self._sigmas))
            return min(steps, key=lambda step: abs(self._sigmas[step] - sigma))
        if sigma not in self._seen:
            self._seen.append(sigma)
        return self._seen.index(sigma)

    def spares(self, sigma: float) -> bool:
        """True where tokens would merge if ``sigma`` were not that of the last step."""
        last = len(self._sigmas) - 1
        return self._spares_last and self.is_active(sigma) and self.step(sigma) == last

    def epoch(self, sigma: float) -> Epoch | None:
        """The epoch of ``sigma``, or None where tokens do not merge."""
        if not self.is_active(sigma) or self.spares(sigma):
            return None
        step = self.step(sigma)
        if self._selection_steps:
            return Epoch(bisect_right(self._selection_steps, step), 0)
        age = max(0, step - self._first)
        selection, within = divmod(age, self._reuse_interval)
        return Epoch(selection, within // self._weight_interval)
