"""What merged in a run, kept for the node "ToMA: Merge Map" where the graph has one."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from comfy_execution.graph_utils import is_link
from comfy_execution.utils import get_executing_context
from torch import Tensor

from ..toma_core.plan import MergePlan
from ..toma_core.regions import Grid
from .options import KEY

RECORD = f"{KEY}_record"
"""Key of the record among the transformer options."""
MAP_NODE = "ToMAMergeMap"
MAX_SHOTS = 2048
"""Choices that a record holds at most: 24 KB each for a picture of 4096 tokens at ratio 0.5."""


class Shot(NamedTuple):
    """One choice of destinations, for the first sample and its picture.

    Attributes:
        block: first block that works with it.
        grid: rows and columns of the picture's tokens.
        kept: ``(merged,)`` tokens at which merged ones stand.
        follows: ``(tokens,)`` kept token that each token follows most.
        whole_step: the step of the choice, where it ran whole to keep detail; None where it merged.
    """

    block: str
    grid: Grid
    kept: Tensor
    follows: Tensor
    whole_step: int | None = None


class Recording:
    """The choices of a MODEL's latest run, by place and by the step at which they were made.

    Clones of the MODEL share it, and it goes when they go.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.origin: dict[str, Any] = {}
        self.merging: set[int] = set()
        self._step = 0
        self._shots: dict[tuple[int, int], Shot] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Recording:
        return self  # ComfyUI 0.3.75 copies the options of a MODEL deeply

    def begin(self, steps: int) -> None:
        """Forget the run before; the next one has ``steps`` steps, 0 if nothing is recorded."""
        self.steps = steps
        self.origin = origin()
        self.merging.clear()
        self._shots.clear()

    def enter(self, step: int) -> None:
        """The model runs for a step at which tokens merge."""
        self._step = step
        self.merging.add(step)

    def note(self, place: int, block: str, plan: MergePlan, runs_whole: bool) -> None:
        """Keep the pattern of a plan made now, unless there is one for this place and step.

        Args:
            place: number of the first block that shares the plan.
            block: name of that block.
            plan: the plan.
            runs_whole: nothing merges by it in this step.
        """
        key = place, self._step
        if key in self._shots or len(self._shots) >= MAX_SHOTS:
            return
        grid = plan.grids[0]
        positions = plan.positions()[0].to("cpu", torch.int32)
        groups = plan.groups()[0, : grid[0] * grid[1]].cpu()
        kept = positions[: plan.merged_per_grid[0]]
        if plan.padding is not None:
            kept = kept[~plan.padding[0, : len(kept)].cpu()]
        whole_step = self._step if runs_whole else None
        self._shots[key] = Shot(block, grid, kept.clone(), positions[groups], whole_step)

    @property
    def places(self) -> list[int]:
        """Places at which tokens merged, in the order in which the model runs them."""
        return sorted({place for place, _ in self._shots})

    def shot(self, place: int, step: int) -> Shot | None:
        """The choice in force at a place and step; None where nothing merges."""
        made = [at for other, at in self._shots if other == place and at <= step]
        return self._shots[place, max(made)] if made and step in self.merging else None


def is_wanted() -> bool:
    """True while a graph with the map node runs; nothing is to be recorded else."""
    graphs = _running().values()
    return any(node["class_type"] == MAP_NODE for graph in graphs for node in graph.values())


def origin() -> dict[str, Any]:
    """The node that runs and all that leads to it, by id; empty outside of a graph."""
    context = get_executing_context()
    if context is None:
        return {}
    graph, found, ahead = _running().get(context.prompt_id, {}), {}, [context.node_id]
    while ahead:
        key = ahead.pop()
        if key in graph and key not in found:
            inputs = graph[key]["inputs"]
            found[key] = graph[key]["class_type"], inputs
            ahead += [value[0] for value in inputs.values() if is_link(value)]
    return found


def _running() -> dict[str, Any]:
    """The graphs that ComfyUI runs now, by the id of the prompt."""
    # Looked up, not imported: the server module belongs to a running ComfyUI.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    running = getattr(getattr(server, "prompt_queue", None), "currently_running", {})
    # An item is its number, its id, its graph, and more.
    return {item[1]: item[2] for item in tuple(running.values())}
