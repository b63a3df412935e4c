"""Where methods are listed: tokens and a layout in, a merge plan out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cells import CellLayout, build_cells
from .config import MergeConfig, Method
from .matching import ca_tome, tofu, tome
from .merge import LinearPlan, RegionPlan, assign, carry
from .plan import MergePlan, Moment, Place
from .regions import Grid, RegionLayout, build_layout
from .selection import choose_destinations, similarity, unit_rows

Layout = RegionLayout | CellLayout


def toma(x: Tensor, layout: RegionLayout, config: MergeConfig, moment: Moment) -> RegionPlan:
    """ToMA: facility location in regions, then weights towards the chosen tokens."""
    units = unit_rows(layout.split(x))
    destinations = choose_destinations(
        similarity(units), layout.kept, layout.valid, layout.protected
    )
    weigh = carry if config.keep_detail else assign
    return weigh(units, layout, destinations, config.temperature, x.dtype)


class _Way(NamedTuple):
    """A method: how it cuts grids, and its function from tokens and that layout to a plan."""

    lay_out: Callable[[tuple[Grid, ...], MergeConfig, torch.device | str, Tensor | None], Any]
    plan: Callable[[Tensor, Any, MergeConfig, Moment], MergePlan]


_WAYS = {
    Method.TOMA: _Way(build_layout, toma),
    Method.CA_TOME: _Way(build_cells, ca_tome),
    Method.TOME: _Way(build_cells, tome),
    Method.TOFU: _Way(build_cells, tofu),
}


def lay_out(
    grids: tuple[Grid, ...],
    config: MergeConfig,
    device: torch.device | str = "cpu",
    mask: Tensor | None = None,
) -> Layout:
    """The grids of a sequence, cut as the method of ``config`` wants them.

    Args:
        grids: rows and columns of each grid, in sequence order.
        config: the method and its settings.
        device: where tables live.
        mask: ``(..., height, width)`` tokens of the first grid that never merge; ToMA's only.
    """
    return _WAYS[config.method].lay_out(grids, config, device, mask)


@torch.no_grad()
def build_plan(
    x: Tensor, layout: Layout, config: MergeConfig, moment: Moment | None = None
) -> MergePlan:
    """Decide for every sample of ``x`` which tokens merge.

    Args:
        x: ``(batch, tokens, channels)`` features that tell which tokens are alike.
        layout: of the sequence, from ``lay_out`` with the same settings.
        config: the method and its settings.
        moment: where in the model and when in the run; None for a first and only plan.
    """
    return _WAYS[config.method].plan(x, layout, config, moment or Moment(Place(), 0))


@torch.no_grad()
def reweigh(plan: MergePlan, x: Tensor, config: MergeConfig) -> MergePlan:
    """The same destinations with weights from the features of now (ToMA section 3.3).

    A plan without weights is returned as it is.
    """
    if not isinstance(plan, LinearPlan):
        return plan
    units = unit_rows(plan.layout.split(x))
    return assign(units, plan.layout, plan.destinations, config.temperature, x.dtype)
