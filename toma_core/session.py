"""The plans of one sampling run. A session is made when sampling starts and dies with it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import MergeConfig
from .merge import MergePlan, join_plans
from .planning import build_plan, reweigh
from .regions import Grid, RegionLayout, build_layout
from .schedule import Action, Epoch


@dataclass(frozen=True, eq=False)
class _Held:
    plan: MergePlan
    epoch: Epoch


class Session:
    """Keeps a plan per condition and site, and the layouts they stand on.

    Plans are made condition by condition, so that the grouping of conditions into model calls,
    which ComfyUI changes with free memory, never changes an image.

    Args:
        config: settings of the run.
    """

    def __init__(self, config: MergeConfig) -> None:
        self.config = config
        self._layouts: dict[tuple[tuple[Grid, ...], torch.device], RegionLayout] = {}
        self._parts: dict[Hashable, _Held] = {}
        self._joined: dict[Hashable, _Held] = {}

    def layout(self, grids: tuple[Grid, ...], device: torch.device) -> RegionLayout:
        """The regions of a sequence of grids, made once per run and device."""
        key = (grids, device)
        layout = self._layouts.get(key)
        if layout is None:
            # setdefault: where two devices' threads meet here, both get the same layout.
            layout = self._layouts.setdefault(key, build_layout(grids, self.config, device))
        return layout

    def held(
        self, site: Hashable, conditions: tuple[Hashable, ...], epoch: Epoch
    ) -> MergePlan | None:
        """The plan last made for these conditions at a site, if it still stands in ``epoch``."""
        held = self._joined.get((site, conditions))
        return held.plan if held is not None and held.epoch == epoch else None

    def plan(
        self,
        site: Hashable,
        conditions: tuple[Hashable, ...],
        epoch: Epoch,
        layout: RegionLayout,
        x: Tensor,
    ) -> MergePlan:
        """The plan of a site, renewed from ``x`` where what is held is too old.

        Args:
            site: blocks that share a pattern.
            conditions: one key per equal share of the batch, in order.
            epoch: of the current step.
            layout: regions of ``x``.
            x: ``(batch, tokens, channels)`` block input.

        Raises:
            ValueError: the batch is no multiple of the number of conditions.
        """
        rows, rest = divmod(x.shape[0], len(conditions))
        if rest:
            raise ValueError(
                f"a batch of {x.shape[0]} cannot be shared equally by {len(conditions)} "
                "conditions. Pass one key per equal share of the batch."
            )
        parts = [
            self._part((site, condition, layout, rows, x.dtype), epoch, layout, part)
            for condition, part in zip(conditions, x.split(rows), strict=True)
        ]
        plan = join_plans(parts)
        self._joined[(site, conditions)] = _Held(plan, epoch)
        return plan

    def _part(self, key: Hashable, epoch: Epoch, layout: RegionLayout, x: Tensor) -> MergePlan:
        held = self._parts.get(key)
        action = epoch.action(held.epoch if held else None)
        if held is None or action is Action.SELECT:
            held = _Held(build_plan(x, layout, self.config), epoch)
        elif action is Action.REWEIGHT:
            held = _Held(reweigh(held.plan, x, self.config), epoch)
        self._parts[key] = held
        return held.plan
