"""Methods that match tokens in pairs: ToMe, ToFu and CA-ToMe.

One token of every cell is drawn as destination. Every other token, a source, is paired with the
destination of largest cosine; which pairs merge is the method's choice. Grids of one sequence are
matched each by itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .cells import CellLayout, Cells
from .config import Matching, MergeConfig
from .groups import Blend, GroupPlan
from .plan import Moment
from .selection import unit_rows


def tome(x: Tensor, layout: CellLayout, config: MergeConfig, moment: Moment) -> GroupPlan:
    """ToMe for Stable Diffusion: the most alike pairs merge to their mean."""
    return _merge_most_alike(x, layout, config, moment, Blend.MEAN)


def tofu(x: Tensor, layout: CellLayout, config: MergeConfig, moment: Moment) -> GroupPlan:
    """ToFu: the pairs of ToMe; early blocks prune, late ones keep the norm of a group."""
    is_early = 2 * moment.place.block < moment.place.blocks
    return _merge_most_alike(x, layout, config, moment, Blend.PRUNE if is_early else Blend.NORM)


def ca_tome(x: Tensor, layout: CellLayout, config: MergeConfig, moment: Moment) -> GroupPlan:
    """CA-ToMe: all pairs at least as alike as the threshold merge to their mean.

    Every sample merges its own pairs only, however many others of its batch merge. How many that
    is only the device knows, so the plan comes uncounted.
    """
    matching = _matching(config)
    follows = [
        _follow(cells, pairs, pairs.similarity >= matching.threshold)
        for cells, pairs in _pairs(x, layout, matching, moment)
    ]
    return GroupPlan(layout, torch.cat(follows, 1), Blend.MEAN)


def _merge_most_alike(
    x: Tensor, layout: CellLayout, config: MergeConfig, moment: Moment, blend: Blend
) -> GroupPlan:
    """The ``ratio * tokens`` most alike pairs of every grid merge."""
    follows, kept = [], []
    for cells, pairs in _pairs(x, layout, _matching(config), moment):
        count = int(config.ratio * cells.tokens)
        # Stable: of equally alike pairs the first ones merge, on every device.
        order = pairs.similarity.argsort(dim=1, descending=True, stable=True)
        merges = torch.zeros_like(pairs.similarity, dtype=torch.bool)
        follows.append(_follow(cells, pairs, merges.scatter(1, order[:, :count], True)))
        kept.append(cells.tokens - count)
    return GroupPlan(layout, torch.cat(follows, 1), blend, (tuple(kept),) * x.shape[0])


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Every source of a grid and its best destination.

    Attributes:
        sources: ``(sources,)`` tokens of the grid.
        destinations: ``(batch, sources)`` the destination of each.
        similarity: ``(batch, sources)`` their cosine, fp32.
    """

    sources: Tensor
    destinations: Tensor
    similarity: Tensor


def _pairs(
    x: Tensor, layout: CellLayout, matching: Matching, moment: Moment
) -> list[tuple[Cells, _Pairs]]:
    generator = _generator(matching.seed, moment)
    units = unit_rows(x)
    found = []
    for cells in layout.cells:
        destinations, sources = cells.draw(generator)
        tokens = units.narrow(1, cells.first, cells.tokens)
        cosine = tokens.index_select(1, sources) @ tokens.index_select(1, destinations).mT
        best = cosine.max(-1)
        found.append((cells, _Pairs(sources, destinations[best.indices], best.values)))
    return found


def _follow(cells: Cells, pairs: _Pairs, merges: Tensor) -> Tensor:
    """``(batch, tokens)`` token of the sequence that every token of a grid follows.

    Args:
        cells: of the grid.
        pairs: of the grid.
        merges: ``(batch, sources)`` True where a pair merges.
    """
    batch = merges.shape[0]
    follows = torch.arange(cells.tokens, device=merges.device).repeat(batch, 1)
    target = torch.where(merges, pairs.destinations, pairs.sources)
    return follows.index_copy(1, pairs.sources, target) + cells.first


def _generator(seed: int, moment: Moment) -> torch.Generator:
    """A private generator for one matching, the same whatever was drawn before it.

    It lives on the CPU, so that every device draws the same destinations.
    """
    name = f"{seed} {moment.place.block} {moment.selection}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def _matching(config: MergeConfig) -> Matching:
    return config.matching or Matching()
