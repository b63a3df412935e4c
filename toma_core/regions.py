"""Regions of a token grid: which tokens may merge, and the way there and back.

A region is a set of tokens of one grid. Regions of one layout may differ in size (a 45 x 37 grid
in tiles of 8): they are stored as a table padded to the largest region, and a mask keeps padding
out of every sum, so attention never sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import MergeConfig, Region

Grid = tuple[int, int]
"""Rows and columns of a token grid."""


@dataclass(frozen=True, eq=False)
class RegionLayout:
    """A sequence of one or more token grids, cut into regions.

    Attributes:
        grids: rows and columns of each grid, in sequence order.
        tokens: length of the sequence.
        index: ``(regions, size)`` token of every place; padding repeats the region's first token.
        valid: ``(regions, size)`` False where a place is padding.
        place: ``(tokens,)`` flat place in ``index`` of every token.
        counts: ``(regions,)`` how many tokens of each region are kept as destinations.
        slots: ``(merged,)`` flat position in ``(regions, kept)`` of every merged token, where
            ``kept`` is the largest count.
        slot_of: ``(regions * kept,)`` merged token that fills a slot; unused slots point at 0.
        merged_per_grid: merged tokens of each grid, in sequence order.
        protected: ``(regions, size)`` True where a token must be kept; None where none must.
        contiguous: the regions follow one another in the sequence, so splitting is a view.
        uniform: every region keeps the same number, so compacting is a view.
    """

    grids: tuple[Grid, ...]
    tokens: int
    index: Tensor
    valid: Tensor
    place: Tensor
    counts: Tensor
    slots: Tensor
    slot_of: Tensor
    merged_per_grid: tuple[int, ...]
    kept: int
    protected: Tensor | None
    contiguous: bool
    uniform: bool

    @property
    def regions(self) -> int:
        return self.index.shape[0]

    @property
    def size(self) -> int:
        """Places of a region, padding included."""
        return self.index.shape[1]

    @property
    def merged(self) -> int:
        """Tokens that are left after merging."""
        return sum(self.merged_per_grid)

    @property
    def is_identity(self) -> bool:
        return self.merged == self.tokens

    def split(self, x: Tensor) -> Tensor:
        """``(batch, tokens, channels)`` -> ``(batch, regions, size, channels)``."""
        if not self.contiguous:
            x = x.index_select(1, self.index.flatten())
        return x.reshape(x.shape[0], self.regions, self.size, x.shape[-1])

    def join(self, x: Tensor) -> Tensor:
        """``(batch, regions, size, channels)`` -> ``(batch, tokens, channels)``."""
        x = x.flatten(1, 2)
        return x if self.contiguous else x.index_select(1, self.place)

    def compact(self, x: Tensor) -> Tensor:
        """``(batch, regions, kept, ...)`` -> ``(batch, merged, ...)``: drops unused slots."""
        x = x.flatten(1, 2)
        return x if self.uniform else x.index_select(1, self.slots)

    def expand(self, x: Tensor) -> Tensor:
        """``(batch, merged, channels)`` -> ``(batch, regions, kept, channels)``.

        Unused slots hold copies of a real token; their weights are zero.
        """
        if not self.uniform:
            x = x.index_select(1, self.slot_of)
        return x.reshape(x.shape[0], self.regions, self.kept, x.shape[-1])


def build_layout(
    grids: tuple[Grid, ...],
    config: MergeConfig,
    device: torch.device | str = "cpu",
    mask: Tensor | None = None,
) -> RegionLayout:
    """Cut the grids of a sequence into regions of ``config``.

    Every region of ``n`` tokens keeps ``n - round(ratio * n)`` of them, at least one; more where
    the mask protects more, and then one for the rest.

    Args:
        grids: rows and columns of each grid, in sequence order.
        config: region kind, tile size and ratio.
        device: where the index tables live.
        mask: ``(..., height, width)`` of the first grid's picture, in any size; tokens that it
            touches anywhere with more than half are protected.

    Raises:
        ValueError: no grid, or a grid without tokens.
    """
    if not grids or any(rows < 1 or columns < 1 for rows, columns in grids):
        raise ValueError(f"every token grid needs at least one row and one column, got {grids}.")
    region_of: list[Tensor] = []
    counts: list[Tensor] = []
    protected: list[Tensor] = []
    regions = 0
    for grid in grids:
        own = _regions_of(grid, config)
        sizes = own.bincount()
        region_of.append(own + regions)
        protected.append(_touched(grid, None if protected else mask))
        needed = torch.zeros_like(sizes).index_add(0, own, protected[-1].long())
        needed += needed < sizes  # one for all that is not protected
        counts.append((sizes - (config.ratio * sizes + 0.5).long()).maximum(needed))
        regions += len(sizes)
    merged_per_grid = tuple(int(count.sum()) for count in counts)
    return _tables(
        grids,
        torch.cat(region_of),
        torch.cat(counts),
        torch.cat(protected),
        merged_per_grid,
        torch.device(device),
    )


def _touched(grid: Grid, mask: Tensor | None) -> Tensor:
    """``(tokens,)`` True where a token of a grid lies under the mask."""
    if mask is None:
        return torch.zeros(grid[0] * grid[1], dtype=torch.bool)
    pictures = mask.detach().float().cpu().reshape(-1, *mask.shape[-2:])
    joined = pictures.amax(0, keepdim=True)
    return (torch.nn.functional.adaptive_max_pool2d(joined, grid) > 0.5).flatten()


def _tables(
    grids: tuple[Grid, ...],
    region_of: Tensor,
    counts: Tensor,
    protected: Tensor,
    merged_per_grid: tuple[int, ...],
    device: torch.device,
) -> RegionLayout:
    sizes = region_of.bincount()
    regions, size, kept, tokens = len(sizes), int(sizes.max()), int(counts.max()), len(region_of)
    order = region_of.argsort(stable=True)
    first = sizes.cumsum(0) - sizes
    valid = torch.arange(size) < sizes[:, None]
    index = order[first][:, None].repeat(1, size)
    index[valid] = order
    place = torch.empty(tokens, dtype=torch.long)
    place[order] = valid.flatten().nonzero().squeeze(1)
    used = (torch.arange(kept) < counts[:, None]).flatten()
    return RegionLayout(
        grids=grids,
        tokens=tokens,
        index=index.to(device),
        valid=valid.to(device),
        place=place.to(device),
        counts=counts.to(device),
        slots=used.nonzero().squeeze(1).to(device),
        slot_of=((used.cumsum(0) - 1) * used).clamp_min(0).to(device),
        merged_per_grid=merged_per_grid,
        kept=kept,
        protected=(protected[index] & valid).to(device) if protected.any() else None,
        contiguous=regions * size == tokens and torch.equal(order, torch.arange(tokens)),
        uniform=bool(used.all()),
    )


def _regions_of(grid: Grid, config: MergeConfig) -> Tensor:
    """``(tokens,)`` region of every token of one grid."""
    rows, columns = grid
    height = width = config.tile_size
    if config.region is Region.GLOBAL:
        height, width = rows, columns
    elif config.region is Region.STRIPE:
        # As many whole rows as hold about the tokens of a tile, so that both cost the same.
        height, width = max(1, round(config.tile_size**2 / columns)), columns
    band, section = _even_parts(rows, height), _even_parts(columns, width)
    return (band[:, None] * (section[-1] + 1) + section).flatten()


def _even_parts(length: int, at_most: int) -> Tensor:
    """``(length,)`` part of every row (or column): the fewest parts of at most ``at_most``.

    Their lengths differ by at most one.
    """
    parts = -(-length // at_most)
    return ((torch.arange(length) + 1) * parts - 1) // length
