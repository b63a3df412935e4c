"""Ideas that would change how ToMA merges, as rows of `python tools quality`.

None of them paid (docs/quality.md), so the nodes have none. While such a row samples, it takes the
place of parts of the pack; nothing of it stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from comfy.patcher_extension import WrappersMP
from comfyui_toma.nodes.run import Site
from comfyui_toma.toma_core import planning, regions
from comfyui_toma.toma_core.config import MergeConfig, Method
from comfyui_toma.toma_core.detail import Carry
from comfyui_toma.toma_core.merge import CarryPlan, carry
from comfyui_toma.toma_core.plan import MergePlan, Moment
from comfyui_toma.toma_core.regions import Grid, RegionLayout, build_layout
from comfyui_toma.toma_core.selection import facility_location, similarity, unit_rows
from torch import Tensor

Plan = Callable[[Tensor, RegionLayout, MergeConfig, Moment], MergePlan]


def shifted_tiles(model: Any) -> Any:
    """`model`, its tiles moved by half a tile at every other choice of destinations."""
    layouts: dict[tuple, RegionLayout] = {}

    def plan(x: Tensor, layout: RegionLayout, config: MergeConfig, moment: Moment) -> MergePlan:
        shift = moment.selection % 2 * config.tile_size // 2
        key = (layout.grids, x.device, shift)
        # samples whose plans are joined must have one layout
        if key not in layouts:
            layouts[key] = shifted(layout.grids, config, shift, x.device)
        return planning.toma(x, layouts[key], config, moment)

    return _while_sampling(model, lambda: _planning(plan))


def shifted(
    grids: tuple[Grid, ...], config: MergeConfig, shift: int, device: torch.device
) -> RegionLayout:
    """Tiles of which the first of every row and column is `shift` tokens shorter."""

    def parts(length: int, size: int) -> Tensor:
        return (torch.arange(length) + shift) // size

    with mock.patch.object(regions, "_even_parts", parts):
        return build_layout(grids, config, device)


def budget_over_regions(model: Any) -> Any:
    """`model`, in which a region keeps as many destinations as they are worth there."""
    return _while_sampling(model, lambda: _planning(budget))


def budget(x: Tensor, layout: RegionLayout, config: MergeConfig, moment: Moment) -> MergePlan:
    """One threshold on the gains of all regions; in all as many destinations as `layout` keeps.

    A region gets at least one, and half more than its share at most.
    """
    units = unit_rows(layout.split(x))
    cosine = similarity(units)
    most = min(layout.size, math.ceil(1.5 * layout.kept))
    picks = facility_location(cosine, most, layout.valid)
    cover = cosine.take_along_dim(picks[..., None], -2).cummax(-2).values
    worth = cover.masked_fill(~layout.valid[:, None], 0).sum(-1)
    gains = worth.diff(prepend=torch.full_like(worth[..., :1], -torch.inf)).cummin(-1).values
    region_of = (layout.place // layout.size).cpu()
    plans = []
    for sample, gain in enumerate(gains):
        chosen = gain.flatten().argsort(descending=True, stable=True)[: layout.merged]
        counts = (chosen // most).bincount(minlength=layout.regions)
        own = regions._tables(
            layout.grids, region_of, counts.cpu(), torch.zeros(layout.tokens, dtype=torch.bool),
            layout.merged_per_grid, x.device,
        )  # fmt: skip
        unit, picked = units[sample, None], picks[sample, None, :, : own.kept]
        plans.append(carry(unit, own, picked, config.temperature, x.dtype))
    return Apart.of(plans)


@dataclass(frozen=True, eq=False)
class Apart(CarryPlan):
    """Plans of single samples whose regions differ; all keep equally many tokens."""

    plans: tuple[CarryPlan, ...]

    @classmethod
    def of(cls, plans: Sequence[CarryPlan]) -> Apart:
        """One plan of all of them."""
        first = plans[0]
        return cls(first.layout, first.destinations, first.unmerge_weights, tuple(plans))

    @property
    def batch(self) -> int:
        return len(self.plans)

    @property
    def source_index(self) -> Tensor:
        return torch.cat([plan.source_index for plan in self.plans])

    def positions(self) -> Tensor:
        return torch.cat([plan.positions() for plan in self.plans])

    def groups(self) -> Tensor:
        return torch.cat([plan.groups() for plan in self.plans])

    def merge_image(self, x: Tensor) -> Tensor:
        return self._each(CarryPlan.merge_image, x)

    def unmerge_image(self, y: Tensor) -> Tensor:
        return self._each(CarryPlan.unmerge_image, y)

    def of_sources(self, detail: Tensor) -> Tensor:
        return self._each(CarryPlan.of_sources, detail)

    def _each(self, function: Callable[[CarryPlan, Tensor], Tensor], x: Tensor) -> Tensor:
        pairs = zip(self.plans, x.split(1), strict=True)
        return torch.cat([function(plan, sample) for plan, sample in pairs])

    def joined(self, others: Sequence[Apart]) -> Apart:
        return Apart.of([plan for each in (self, *others) for plan in each.plans])


def chosen_by_outputs(model: Any) -> Any:
    """`model`, whose destinations are chosen by what a block returned at the step before."""
    outputs: dict[tuple, Tensor] = {}
    first_of: dict[Site, str] = {}
    keys: dict[Carry, tuple] = {}
    make, make_carry, give = Site._make, Site.carry, Carry.give

    def from_output(site: Site, x: Tensor, grids: tuple[Grid, ...], block: str) -> Any:
        known = outputs.get((site._place, site._conditions))
        return make(site, x if known is None or known.shape != x.shape else known, grids, block)

    def noting(site: Site, name: str, plan: MergePlan) -> Carry:
        result = make_carry(site, name, plan)
        if name == first_of.setdefault(site, name):
            keys[result] = site._place, site._conditions
        return result

    def note(way: Carry, y: Tensor, prefix: int = 0) -> Tensor:
        result = give(way, y, prefix)
        if way in keys:
            outputs[keys.pop(way)] = result[:, prefix:]
        return result

    @contextmanager
    def swapped() -> Iterator[None]:
        try:
            with (
                mock.patch.object(Site, "_make", from_output),
                mock.patch.object(Site, "carry", noting),
                mock.patch.object(Carry, "give", note),
            ):
                yield
        finally:
            for memory in (outputs, first_of, keys):
                memory.clear()

    return _while_sampling(model, swapped)


def _planning(plan: Plan) -> AbstractContextManager:
    way = planning._Way(build_layout, plan)
    return mock.patch.dict(planning._WAYS, {Method.TOMA: way})


def _while_sampling(model: Any, swap: Callable[[], AbstractContextManager]) -> Any:
    patched = model.clone()

    def sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with swap():
            return executor(*args, **kwargs)

    patched.add_wrapper(WrappersMP.OUTER_SAMPLE, sample)
    return patched
