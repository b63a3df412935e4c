"""Cells of four tokens, one of which is a destination (ToMe for Stable Diffusion)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import MergeConfig
from .regions import Grid

SIDE = 2
"""Rows and columns of a cell; a grid of one row (or column) has cells of one by four."""


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one grid.

    Attributes:
        first: token of the sequence at which the grid begins.
        tokens: of the grid.
        members: ``(cells, size)`` tokens of the grid in every cell.
        rest: ``(tokens - cells * size,)`` tokens of an odd last row or column, in no cell.
    """

    first: int
    tokens: int
    members: Tensor
    rest: Tensor

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One destination of every cell, and all other tokens of the grid.

        Returns:
            ``(cells,)`` destinations and ``(tokens - cells,)`` sources.
        """
        cells, size = self.members.shape
        # Bytes: a transfer of up to 64 KiB does not make the host wait for the device.
        turn = torch.randint(size, (cells, 1), generator=generator, dtype=torch.uint8)
        turn = turn.to(self.members.device, non_blocking=self.members.is_cuda).long()
        turned = (turn + torch.arange(size, device=turn.device)) % size
        members = self.members.gather(1, turned)
        return members[:, 0], torch.cat((members[:, 1:].flatten(), self.rest))


@dataclass(frozen=True, eq=False)
class CellLayout:
    """A sequence of one or more token grids, each cut into cells.

    Attributes:
        grids: rows and columns of each grid, in sequence order.
        cells: of each grid.
    """

    grids: tuple[Grid, ...]
    cells: tuple[Cells, ...]

    @property
    def protected(self) -> None:
        """No token is: only ToMA protects any."""
        return None

    @property
    def tokens(self) -> int:
        return sum(cells.tokens for cells in self.cells)

    @property
    def is_identity(self) -> bool:
        """True when every token is a destination."""
        return self.tokens == len(self.cells)


def build_cells(
    grids: tuple[Grid, ...],
    config: MergeConfig,
    device: torch.device | str = "cpu",
    mask: Tensor | None = None,
) -> CellLayout:
    """Cut the grids of a sequence into cells.

    Args:
        grids: rows and columns of each grid, in sequence order.
        config: of the run; cells are the same for every setting.
        device: where the tables live.
        mask: not taken into account; only ToMA protects tokens.
    """
    cells, first = [], 0
    for rows, columns in grids:
        cells.append(_cells(first, rows, columns, torch.device(device)))
        first += rows * columns
    return CellLayout(grids, tuple(cells))


def _cells(first: int, rows: int, columns: int, device: torch.device) -> Cells:
    height = min(SIDE if columns > 1 else SIDE**2, rows)
    width = min(SIDE if rows > 1 else SIDE**2, columns)
    token = torch.arange(rows * columns).reshape(rows, columns)
    down, across = rows // height, columns // width
    inside = token[: down * height, : across * width]
    members = inside.reshape(down, height, across, width).transpose(1, 2)
    rest = torch.cat(
        (token[: down * height, across * width :].flatten(), token[down * height :].flatten())
    )
    return Cells(
        first, rows * columns, members.reshape(-1, height * width).to(device), rest.to(device)
    )
