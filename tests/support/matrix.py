"""Large test matrices: all of them on request, a fixed sample in CI."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def matrix(full: Iterable[T], every: int) -> list[T]:
    """All cases under ``TOMA_FULL=1``, else one in ``every``, drawn across all axes.

    The sample is the same in every run: it depends on nothing but the order of ``full``.
    """
    cases = list(full)
    if os.environ.get("TOMA_FULL"):
        return cases
    chosen = sorted(random.Random(0).sample(range(len(cases)), -(-len(cases) // every)))
    return [cases[number] for number in chosen]
