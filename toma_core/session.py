"""The plans of one sampling run. A session is made when sampling starts and dies with it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .config import MergeConfig
from .detail import Kept
from .groups import GroupPlan, count_kept
from .plan import MergePlan, Moment, Place, join_plans
from .planning import Layout, build_plan, lay_out, reweigh
from .regions import Grid
from .schedule import Action, Epoch


@dataclass(frozen=True, eq=False)
class Held:
    """A plan, and what is kept beside it.

    Attributes:
        plan: the plan.
        epoch: it was made, or last weighed, in.
        memory: what whole functions kept, by name; None where the settings keep nothing.
        is_new: some of its destinations were chosen just now.
        waits: for some conditions all tokens stay until those of their first plan are counted.
    """

    plan: MergePlan
    epoch: Epoch
    memory: dict[str, Kept] | None = None
    is_new: bool = False
    waits: bool = False

    @property
    def runs_whole(self) -> bool:
        """True where functions run whole now, so that detail can be kept of them."""
        return self.is_new and self.memory is not None


class Session:
    """Keeps a plan per condition and place, and the layouts they stand on.

    Plans are made condition by condition, so that the grouping of conditions into model calls,
    which ComfyUI changes with free memory, never changes an image.

    Args:
        config: settings of the run.
        mask: ``(..., height, width)`` of the picture: where tokens never merge.
    """

    def __init__(self, config: MergeConfig, mask: Tensor | None = None) -> None:
        self.config = config
        self._mask = mask
        self._layouts: dict[tuple[tuple[Grid, ...], torch.device], Layout] = {}
        self._parts: dict[Hashable, Held] = {}
        self._joined: dict[tuple[Place, tuple[Hashable, ...]], Held] = {}
        self._uncounted: dict[torch.device, dict[Hashable, tuple[GroupPlan, Epoch]]] = {}

    @property
    def kept_bytes(self) -> int:
        """Memory that kept detail takes now."""
        # A copy: another device's thread may be at work.
        memories = [held.memory or {} for held in tuple(self._joined.values())]
        return sum(kept.bytes for memory in memories for kept in tuple(memory.values()))

    def layout(self, grids: tuple[Grid, ...], device: torch.device) -> Layout:
        """The layout of a sequence of grids, made once per run and device."""
        key = (grids, device)
        layout = self._layouts.get(key)
        if layout is None:
            # setdefault: where two devices' threads meet here, both get the same layout.
            layout = self._layouts.setdefault(key, lay_out(grids, self.config, device, self._mask))
        return layout

    def count(self, device: torch.device) -> bool:
        """Between two calls of the model: count the tokens of the plans that the earlier one made.

        Only the device knows how many tokens CA-ToMe leaves. Asking in every block would make the
        host wait each time, so it asks for all blocks at once. The new plans take over then; until
        then the ones before them serve or, where there is none, all tokens stay.

        Returns:
            True where plans take over.
        """
        uncounted = self._uncounted.pop(device, {})
        if not uncounted:
            return False
        counted = count_kept([plan for plan, _ in uncounted.values()])
        for (key, (_, epoch)), plan in zip(uncounted.items(), counted, strict=True):
            self._parts[key] = Held(plan, epoch, is_new=True)
        return True

    def held(self, place: Place, conditions: tuple[Hashable, ...], epoch: Epoch) -> Held | None:
        """What was last made for these conditions at a place, if it still stands in ``epoch``."""
        held = self._joined.get((place, conditions))
        return held if held is not None and held.epoch == epoch else None

    def plan(
        self,
        place: Place,
        conditions: tuple[Hashable, ...],
        epoch: Epoch,
        layout: Layout,
        x: Tensor,
    ) -> Held:
        """The plan of a place, renewed from ``x`` where what is held is too old.

        Args:
            place: blocks that share a pattern.
            conditions: one key per equal share of the batch, in order.
            epoch: of the current step.
            layout: of ``x``.
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
            self._part(place, (condition, rows, x.dtype), epoch, layout, part)
            for condition, part in zip(conditions, x.split(rows), strict=True)
        ]
        plan = join_plans([part.plan for part in parts])
        is_new = any(part.is_new for part in parts)
        memory = None
        if self.config.keep_detail:
            memory = {} if is_new else self._regrouped(place, conditions, epoch, plan)
        self._forget(place, conditions, epoch)
        waits = any(part.waits for part in parts)
        # A plan that only stands in is asked for anew.
        if not waits and all(part.epoch == epoch for part in parts):
            self._joined[(place, conditions)] = Held(plan, epoch, memory)
        return Held(plan, epoch, memory, is_new, waits)

    def _part(self, place: Place, share: Hashable, epoch: Epoch, layout: Layout, x: Tensor) -> Held:
        key = (place, share, layout)
        held = self._parts.get(key)
        action = epoch.action(held.epoch if held else None)
        if held is None or action is Action.SELECT:
            plan = build_plan(x, layout, self.config, Moment(place, epoch.selection))
            if isinstance(plan, GroupPlan) and plan.counts is None:
                self._uncounted.setdefault(x.device, {})[key] = plan, epoch
                return held or Held(plan.whole(), epoch, waits=True)
            self._parts[key] = Held(plan, epoch)
            return Held(plan, epoch, is_new=True)
        if action is Action.REWEIGHT:
            held = replace(held, plan=reweigh(held.plan, x, self.config), epoch=epoch)
        self._parts[key] = replace(held, is_new=False)
        return held

    def _regrouped(
        self, place: Place, conditions: tuple[Hashable, ...], epoch: Epoch, plan: MergePlan
    ) -> dict[str, Kept]:
        """What other groupings of these conditions kept in this epoch, of all of them."""
        rows = plan.batch // len(conditions)
        shares = []
        for condition in conditions:
            for (other, group), held in self._joined.items():
                fits = held.plan.grids == plan.grids and held.plan.batch == rows * len(group)
                if other is place and held.epoch == epoch and condition in group and fits:
                    first = group.index(condition) * rows
                    memory = held.memory or {}
                    shares.append({name: kept.rows(first, rows) for name, kept in memory.items()})
                    break
            else:
                return {}
        first, *others = shares
        return {
            name: kept.joined([other[name] for other in others])
            for name, kept in first.items()
            if all(name in other for other in others)
        }

    def _forget(self, place: Place, conditions: tuple[Hashable, ...], epoch: Epoch) -> None:
        """Drop what earlier epochs hold for any of these conditions, however they were grouped."""
        for other, group in tuple(self._joined):
            is_old = self._joined[other, group].epoch.selection != epoch.selection
            if other is place and is_old and not set(group).isdisjoint(conditions):
                del self._joined[other, group]
