"""Sums over groups of rows by matrix products.

Atomic additions leave the order of a sum to chance, and not every backend has another sum over
groups of unlike sizes. Here rows stand group by group and are cut into chunks. A product with a
matrix of zeros and ones sums each group within each chunk. What a chunk holds of a group that began
in an earlier one is its first sum; these sums are rows again, fewer, and are summed in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .rows import rows_of_all

CHUNK = 16
"""Rows of a chunk."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Which rows of every sample belong together.

    Attributes:
        rows: ``(batch * chunks, CHUNK)`` rows of all samples in one, group by group.
        turns: ``(batch * chunks, CHUNK)`` which group of its chunk each row belongs to, from 0.
        begins: ``(batch * groups,)`` where each group begins, as chunk * CHUNK + turn, over all
            samples.
        sizes: ``(batch, groups, 1)`` rows of each group, which may be none.
        later: groups of the chunks' first sums; None where no chunk begins within a group.
    """

    rows: Tensor
    turns: Tensor
    begins: Tensor
    sizes: Tensor
    later: Segments | None

    def mean(self, x: Tensor) -> Tensor:
        """``(batch, rows, channels)`` -> ``(batch, groups, channels)``, zero for an empty group.

        In fp32: a half-precision sum of a large group overflows before it is divided.
        """
        return self._sum(x.flatten(0, 1)) / self.sizes.clamp_min(1)

    def largest(self, x: Tensor) -> Tensor:
        """``(batch, rows)``, none negative -> ``(batch, groups, 1)``, zero for an empty group."""
        return self._largest(x.flatten())

    def _sum(self, x: Tensor) -> Tensor:
        chunks = x.index_select(0, self.rows.flatten()).float().unflatten(0, self.rows.shape)
        sums = self._belongs() @ chunks
        found = self._begun(sums)
        return found if self.later is None else found + self.later._sum(sums[:, 0])

    def _largest(self, x: Tensor) -> Tensor:
        chunks = x.index_select(0, self.rows.flatten()).reshape(self.rows.shape)
        most = (self._belongs() * chunks[:, None]).amax(-1)
        found = self._begun(most[..., None])
        return found if self.later is None else found.maximum(self.later._largest(most[:, 0]))

    def _belongs(self) -> Tensor:
        """``(batch * chunks, turns, rows)`` 1 where a row belongs to a group of its chunk."""
        turn = torch.arange(CHUNK, device=self.turns.device)
        return (self.turns[:, None] == turn[:, None]).float()

    def _begun(self, parts: Tensor) -> Tensor:
        """``(batch * chunks, turns, channels)`` that chunks found -> that of every group."""
        begun = parts.flatten(0, 1).index_select(0, self.begins)
        return begun.unflatten(0, self.sizes.shape[:2]).masked_fill(self.sizes == 0, 0.0)


def build_segments(groups: Tensor, count: int) -> Segments:
    """Sort rows by group.

    Args:
        groups: ``(batch, rows)`` group of each row, from 0; -1 for a row that belongs to none.
        count: number of groups; some may be empty.
    """
    batch, rows = groups.shape
    order = groups.argsort(dim=1, stable=True)
    ordered = groups.gather(1, order)
    wanted = torch.arange(count + 1, device=groups.device).expand(batch, -1).contiguous()
    edges = torch.searchsorted(ordered, wanted)
    # The last chunk is filled up with rows of a group that nobody asks for.
    chunks = pad(ordered, (0, -rows % CHUNK), value=count).unflatten(1, (-1, CHUNK))
    order = pad(order, (0, -rows % CHUNK))
    turns = pad(chunks[..., 1:] != chunks[..., :-1], (1, 0)).cumsum(-1)
    starts = edges[:, :-1].clamp_max(rows - 1)
    begins = starts // CHUNK * CHUNK + turns.flatten(1).gather(1, starts)
    later = None
    if chunks.shape[1] > 1:
        heads = chunks[..., 0]
        first = torch.arange(heads.shape[1], device=groups.device) * CHUNK
        goes_on = edges.gather(1, heads.clamp_min(0)) < first
        later = build_segments(heads.masked_fill(~goes_on, -1), count)
    return Segments(
        rows_of_all(order, rows).reshape(-1, CHUNK),
        turns.flatten(0, 1),
        rows_of_all(begins, chunks.shape[1] * CHUNK),
        edges.diff(dim=1)[..., None],
        later,
    )
