"""Sums over groups of rows by matrix products.

Atomic additions leave the order of a sum to chance, and not every backend has another sum over
groups of unlike sizes. Here rows stand group by group and are cut into chunks. A product with a
matrix of zeros and ones sums each group within each chunk; a second one adds what later chunks hold
of a group that began before them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
"""Rows of a chunk: few enough that a product costs little beside the rows themselves."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Which rows of every sample belong together.

    Attributes:
        rows: ``(batch * chunks, CHUNK)`` rows of all samples in one, group by group.
        turns: ``(batch * chunks, CHUNK)`` which group of its chunk each row belongs to, from 0; -1
            where a last chunk is filled up.
        begins: ``(batch, groups)`` where each group begins, as chunk * CHUNK + turn.
        continues: ``(batch, chunks)`` the group of an earlier chunk that goes on in each; -1 for
            none.
        sizes: ``(batch, groups, 1)`` rows of each group, which may be none.
    """

    rows: Tensor
    turns: Tensor
    begins: Tensor
    continues: Tensor
    sizes: Tensor

    def mean(self, x: Tensor) -> Tensor:
        """``(batch, rows, channels)`` -> ``(batch, groups, channels)``, zero for an empty group.

        In fp32: a half-precision sum of a large group overflows before it is divided.
        """
        chunks = x.flatten(0, 1).index_select(0, self.rows.flatten()).float()
        sums = self._near() @ chunks.unflatten(0, self.rows.shape)
        later = self._far() @ sums[:, 0].unflatten(0, self.continues.shape)
        return (self._begun(sums) + later) / self.sizes.clamp_min(1)

    def largest(self, x: Tensor) -> Tensor:
        """``(batch, rows)`` not negative -> ``(batch, groups, 1)``, zero for an empty group."""
        chunks = x.flatten().index_select(0, self.rows.flatten()).reshape(self.rows.shape)
        most = (self._near() * chunks[:, None]).amax(-1, keepdim=True)
        later = self._far() * most[:, 0].reshape(self.continues.shape)[:, None]
        return self._begun(most).maximum(later.amax(-1, keepdim=True))

    def _near(self) -> Tensor:
        """``(batch * chunks, CHUNK, CHUNK)`` 1 where a row belongs to a group of its chunk."""
        turn = torch.arange(CHUNK, device=self.turns.device)
        return (self.turns[:, None] == turn[:, None]).float()

    def _far(self) -> Tensor:
        """``(batch, groups, chunks)`` 1 where a group of an earlier chunk goes on."""
        group = torch.arange(self.begins.shape[1], device=self.begins.device)
        return (self.continues[:, None] == group[:, None]).float()

    def _begun(self, parts: Tensor) -> Tensor:
        """``(batch * chunks, CHUNK, channels)`` -> that of each group in the chunk it begins in."""
        begun = parts.flatten(0, 1).index_select(0, rows_of_all(self.begins, self.turns.numel()))
        return begun.unflatten(0, self.begins.shape).masked_fill(self.sizes == 0, 0.0)


def build_segments(groups: Tensor, count: int) -> Segments:
    """Sort rows by group.

    Args:
        groups: ``(batch, rows)`` group of each row, from 0.
        count: number of groups; some may be empty.
    """
    batch, rows = groups.shape
    order = groups.argsort(dim=1, stable=True)
    ordered = groups.gather(1, order)
    wanted = torch.arange(count + 1, device=groups.device).expand(batch, -1).contiguous()
    edges = torch.searchsorted(ordered, wanted)
    # A last chunk is filled up with rows that count for nothing.
    fill = (0, -rows % CHUNK)
    order, ordered = (torch.nn.functional.pad(each, fill) for each in (order, ordered))
    chunks = ordered.unflatten(1, (-1, CHUNK))
    is_next = torch.nn.functional.pad(chunks[..., 1:] != chunks[..., :-1], (1, 0))
    turns = is_next.cumsum(-1).flatten(1)
    starts = edges[:, :-1].clamp_max(rows - 1)
    begins = starts // CHUNK * CHUNK + turns.gather(1, starts)
    heads = chunks[..., 0]
    first = torch.arange(heads.shape[1], device=groups.device) * CHUNK
    goes_on = edges.gather(1, heads) < first
    turns[:, rows:] = -1
    return Segments(
        rows_of_all(order, batch * rows).unflatten(0, (-1, CHUNK)),
        turns.reshape(-1, CHUNK),
        begins,
        heads.masked_fill(~goes_on, -1),
        edges.diff(dim=1)[..., None],
    )


def rows_of_all(index: Tensor, total: int) -> Tensor:
    """``(batch, n)`` rows of every sample as rows of all samples in one, flat.

    Args:
        index: rows of each sample.
        total: rows of all samples together.
    """
    batch = index.shape[0]
    first = torch.arange(batch, device=index.device) * (total // batch)
    return (index + first[:, None]).flatten()
