"""Rows by an index of its own for every sample, through the one gather that every backend has."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_of_all(index: Tensor, length: int) -> Tensor:
    """``(batch, n)`` rows of samples of ``length`` as rows of all samples in one, flat."""
    first = torch.arange(index.shape[0], device=index.device) * length
    return (index + first[:, None]).flatten()


def take_rows(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """Rows of ``x`` along ``axis``.

    Args:
        x: ``(batch or 1, ...)``.
        index: ``(batch, rows)``.
    """
    x = x.expand(index.shape[0], *x.shape[1:]).movedim(axis, 1)
    taken = x.flatten(0, 1).index_select(0, rows_of_all(index, x.shape[1]))
    return taken.unflatten(0, index.shape).movedim(1, axis)
