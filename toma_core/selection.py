"""Choice of destinations by facility location (ToMA section 3.1).

For tokens with cosine similarity S, a set A of destinations is worth
``f(A) = sum_j max_{i in A} S_ij``: how well every token is represented by its nearest destination.
f is submodular for non-negative S, so picking greedily reaches at least (1 - 1/e) of the optimum
(Nemhauser et al. 1978).
"""

from __future__ import annotations

import torch
from torch import Tensor

_NO_COVER = -1.0
"""Cover of a token before the first pick: the least cosine, so that the first pick maximises the
sum of similarities, as the greedy rule asks."""

TIE = 1e-4
"""Gains that differ by less are equal. Two tokens that are nearest to each other gain exactly the
same, by the symmetry of S; which of them is picked must not hang on rounding, and so on the batch.
"""


def unit_rows(x: Tensor) -> Tensor:
    """Rows of ``x`` at unit length, in fp32; zero rows stay zero.

    Args:
        x: ``(..., channels)``, any floating dtype.
    """
    x = x.float()
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(torch.finfo(torch.float32).tiny)


def similarity(units: Tensor) -> Tensor:
    """Cosine similarity of all pairs, ``(..., tokens, channels)`` -> ``(..., tokens, tokens)``.

    A token is fully similar to itself even where it is zero, so that every destination belongs to
    its own group.
    """
    cosine = units @ units.transpose(-1, -2)
    cosine.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return cosine


def facility_location(cosine: Tensor, count: int, valid: Tensor | None = None) -> Tensor:
    """Greedy facility location, batched over all leading axes.

    Each pick is ``argmax_i sum_j max(0, S_ij - m_j)`` with ``m_j`` the similarity of token j to
    the picks so far; ties (within ``TIE``) go to the lowest index and no token is picked twice.

    Args:
        cosine: ``(..., tokens, tokens)`` fp32 similarity, symmetric.
        count: destinations to pick.
        valid: ``(..., tokens)`` False where a token is padding; broadcasts over leading axes.
            Padding neither is picked before real tokens nor counts as represented.

    Returns:
        ``(..., count)`` picked tokens in the order of picking; gains never increase along it.
        Where fewer valid tokens exist than ``count``, the rest is 0.

    Raises:
        ValueError: ``count`` is not in 1..tokens.
    """
    *lead, tokens, _ = cosine.shape
    if not 1 <= count <= tokens:
        raise ValueError(f"count must be from 1 to {tokens} (the tokens given), got {count}.")
    cosine = cosine.reshape(-1, tokens, tokens)
    blocked = cosine.new_zeros(cosine.shape[0], tokens, dtype=torch.bool)
    if valid is not None:
        blocked = ~valid.expand(*lead, tokens).reshape(-1, tokens)
        cosine = cosine.masked_fill(blocked[:, None, :], _NO_COVER)
    rows = cosine.flatten(0, 1)
    first_row = torch.arange(cosine.shape[0], device=cosine.device) * tokens
    token = torch.arange(tokens, device=cosine.device)
    cover = cosine.new_full((cosine.shape[0], tokens), _NO_COVER)
    gain = torch.empty_like(cosine)
    picks = []
    for _ in range(count):
        torch.sub(cosine, cover[:, None, :], out=gain)
        total = gain.clamp_(min=0).sum(-1).masked_fill(blocked, -torch.inf)
        pick = first_best(total)
        picks.append(pick)
        blocked = blocked | (token == pick[:, None])
        cover = torch.maximum(cover, rows.index_select(0, first_row + pick))
    return torch.stack(picks, -1).reshape(*lead, count)


def first_best(gains: Tensor) -> Tensor:
    """Lowest index of the largest of ``gains`` along the last axis, ties within ``TIE``."""
    return (gains >= gains.amax(-1, keepdim=True) - TIE).to(gains.dtype).argmax(-1)
