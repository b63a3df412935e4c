"""What every method makes: a merge plan. Hosts know plans by this interface and nothing more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .regions import Grid


@dataclass(frozen=True, eq=False)
class Place:
    """Where in a model blocks share plans; each place is one of its own, equal to no other.

    Attributes:
        block: number of the first of these blocks, in the order in which the model runs them.
        blocks: how many blocks the model has.
    """

    block: int = 0
    blocks: int = 1


class Moment(NamedTuple):
    """What a method may know besides tokens and settings: where in the model, and when."""

    place: Place
    selection: int
    """Number of the choice of destinations within the run."""


class MergePlan(ABC):
    """One pattern of merging for a batch, ready to be applied many times.

    Sequences may carry a prefix (text tokens) that passes through whole. All samples merge to the
    same length; where one of them keeps fewer tokens, its rest is padding.
    """

    @property
    @abstractmethod
    def grids(self) -> tuple[Grid, ...]:
        """Rows and columns of each grid, in sequence order."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Number of samples."""

    @property
    @abstractmethod
    def merged_per_grid(self) -> tuple[int, ...]:
        """Merged tokens of each grid, padding included."""

    @property
    def padding(self) -> Tensor | None:
        """``(batch, merged)`` True where a merged token is padding; None where none is."""
        return None

    @abstractmethod
    def positions(self) -> Tensor:
        """``(batch, merged)`` token of the sequence at which every merged token stands."""

    @abstractmethod
    def groups(self) -> Tensor:
        """``(batch, tokens)`` merged token that every token follows most."""

    @abstractmethod
    def merge_image(self, x: Tensor) -> Tensor:
        """``(batch, tokens, channels)`` -> ``(batch, merged, channels)``."""

    @abstractmethod
    def unmerge_image(self, y: Tensor) -> Tensor:
        """``(batch, merged, channels)`` -> ``(batch, tokens, channels)``."""

    @abstractmethod
    def joined(self, others: Sequence[Any]) -> MergePlan:
        """One plan for the samples of this and other plans of the same layout and method."""

    @property
    def tokens(self) -> int:
        return sum(rows * columns for rows, columns in self.grids)

    @property
    def merged(self) -> int:
        return sum(self.merged_per_grid)

    @property
    def is_identity(self) -> bool:
        """True when no sample merges anything."""
        return self.merged == self.tokens and self.padding is None

    def fits(self, x: Tensor, prefix: int = 0) -> bool:
        """True when ``x`` is a batch of the sequences that this plan was made for."""
        return x.shape[0] == self.batch and x.shape[1] == prefix + self.tokens

    def merge(self, x: Tensor, prefix: int = 0) -> Tensor:
        """``(batch, prefix + tokens, channels)`` -> ``(batch, prefix + merged, channels)``."""
        merged = self.merge_image(x[:, prefix:])
        return torch.cat((x[:, :prefix], merged), 1) if prefix else merged

    def unmerge(self, y: Tensor, prefix: int = 0) -> Tensor:
        """``(batch, prefix + merged, channels)`` -> ``(batch, prefix + tokens, channels)``."""
        whole = self.unmerge_image(y[:, prefix:])
        return torch.cat((y[:, :prefix], whole), 1) if prefix else whole

    def hide_padding(
        self, mask: Tensor | None, dtype: torch.dtype, prefix: int = 0
    ) -> Tensor | None:
        """An attention mask under which no query sees padding.

        Args:
            mask: ``(batch, [heads,] queries, prefix + merged)`` to go by besides, or None.
            dtype: of the queries.
            prefix: text tokens before the merged ones.

        Returns:
            ``mask`` itself where nothing is padding, else ``(batch, heads or 1, queries or 1,
            prefix + merged)``.
        """
        if self.padding is None:
            return mask
        hidden = torch.nn.functional.pad(self.padding, (prefix, 0))[:, None, None]
        if mask is None:
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        elif mask.ndim == 3:
            mask = mask[:, None]
        # Finite, since attention in chunks turns a chunk of nothing but -inf into NaN; half the
        # range, since a score is added to it. Its weight in a softmax is exactly zero all the same.
        low = False if mask.dtype is torch.bool else torch.finfo(mask.dtype).min / 2
        return mask.masked_fill(hidden, low)


def join_plans(plans: Sequence[MergePlan]) -> MergePlan:
    """One plan for the samples of several plans of the same layout, in order."""
    first, *others = plans
    return first.joined(others) if others else first
