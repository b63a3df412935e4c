"""Where regions, selection and weights meet: tokens and a layout in, a merge plan out."""

from __future__ import annotations

from torch import Tensor

from .config import MergeConfig
from .merge import MergePlan, assign
from .regions import RegionLayout
from .selection import choose_destinations, similarity, unit_rows


def build_plan(x: Tensor, layout: RegionLayout, config: MergeConfig) -> MergePlan:
    """Choose destinations for every sample of ``x`` and weigh the merge towards them.

    Args:
        x: ``(batch, tokens, channels)`` features that tell which tokens are alike.
        layout: the regions of the sequence.
        config: temperature of the assignment.
    """
    units = unit_rows(layout.split(x))
    destinations = choose_destinations(similarity(units), layout.kept, layout.valid)
    return assign(units, layout, destinations, config.temperature, x.dtype)


def reweigh(plan: MergePlan, x: Tensor, config: MergeConfig) -> MergePlan:
    """The same destinations with weights from the features of now (ToMA section 3.3)."""
    units = unit_rows(plan.layout.split(x))
    return assign(units, plan.layout, plan.destinations, config.temperature, x.dtype)
