"""Choice of destinations by facility location (ToMA section 3.1)."""

# For tokens with cosine similarity S, a set A of destinations is worth
# f(A) = sum_j max_{i in A} S_ij: how well every token is represented by its nearest destination.
# f is submodular for non-negative S, so picking greedily reaches at least (1 - 1/e) of the optimum
# (Nemhauser et al. 1978). Greedy over n tokens costs n^2 per pick; looking at a random handful of
# candidates per pick costs n^2 in all and loses at most EPSILON of that guarantee (Mirzasoleiman et
# al. 2015, Lazier than Lazy Greedy).

from __future__ import annotations

import math

import torch
from torch import Tensor

_NO_COVER = -1.0
"""Cover of a token before the first pick: the least cosine, so that the first pick maximises the
sum of similarities, as the greedy rule asks."""

TIE = 1e-4
"""Gains that differ by less are equal. Two tokens that are nearest to each other gain exactly the
same, by the symmetry of S; which of them is picked must not hang on rounding, and so on the batch.
"""

EXACT_TOKENS = 1024
"""Largest region in which every token is a candidate for every pick; docs/speed.md has the cost."""

EPSILON = 0.01
"""Share of the guarantee that a random handful of candidates may give up."""


def choose_destinations(
    cosine: Tensor, count: int, valid: Tensor | None = None, required: Tensor | None = None
) -> Tensor:
    """Facility location, exact in regions of up to ``EXACT_TOKENS`` and stochastic beyond.

    Arguments and result are those of ``facility_location``, and

    Args:
        required: ``(..., tokens)`` True where a token must be picked; broadcasts over leading axes.
            They come first, in order, and the rest is chosen to go with them.
    """
    exact = cosine.shape[-1] <= EXACT_TOKENS
    choose = facility_location if exact else stochastic_facility_location
    if required is None:
        return choose(cosine, count, valid)
    # No pick can gain where a required token represents as well: raised to what they cover, the
    # similarities make each pick the best addition to all of them.
    cover = cosine.masked_fill(~required[..., :, None], _NO_COVER).amax(-2, keepdim=True)
    others = ~required if valid is None else valid & ~required
    picks = choose(cosine.maximum(cover), count, others)
    before = required.sum(-1, keepdim=True)
    slot = torch.arange(count, device=cosine.device)
    in_order = (~required).long().argsort(dim=-1, stable=True)[..., :count].expand_as(picks)
    later = (slot - before).clamp_min(0).expand_as(picks)
    return torch.where(slot < before, in_order, picks.gather(-1, later))


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
    _check_count(count, tokens)
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


def stochastic_facility_location(cosine: Tensor, count: int, valid: Tensor | None = None) -> Tensor:
    """Greedy facility location that looks at a random few of the tokens left for each pick.

    There are ``tokens / count * ln(1 / epsilon)`` candidates per pick, which loses no more than
    ``epsilon`` of the optimum on average against exact greedy. They are drawn from a generator of
    its own, always seeded alike, so equal tokens give equal picks in every run, on every device, at
    every place in a batch.

    Arguments and errors are those of ``facility_location``; so is the result, but for the order of
    picking, in which gains need not fall.
    """
    *lead, tokens, _ = cosine.shape
    _check_count(count, tokens)
    rows = cosine.reshape(-1, tokens)
    batch = rows.shape[0] // tokens
    real = torch.ones(tokens, dtype=torch.bool, device=rows.device) if valid is None else valid
    real = real.expand(*lead, tokens).reshape(batch, tokens)
    # The tokens left to pick are the first `left` of the pool, in any order.
    pool = (~real).long().argsort(dim=-1, stable=True)
    left = real.sum(-1, keepdim=True)
    handful = min(tokens, math.ceil(tokens / count * math.log(1 / EPSILON)))
    draws = torch.randint(2**31, (count, handful), generator=torch.Generator().manual_seed(0))
    first_row = torch.arange(batch, device=rows.device)[:, None] * tokens
    cover = rows.new_full((batch, tokens), _NO_COVER).masked_fill(~real, torch.inf)
    picks = []
    for draw in draws.to(rows.device):
        places = draw % left.clamp_min(1)
        candidates = pool.gather(1, places)
        close = rows.index_select(0, (candidates + first_row).flatten())
        gain = (close.unflatten(0, (batch, handful)) - cover[:, None, :]).clamp_min_(0).sum(-1)
        best = first_best(gain)[:, None]
        pick = candidates.gather(1, best)
        picks.append(pick.masked_fill(left == 0, 0))
        cover = torch.maximum(cover, rows.index_select(0, (pick + first_row).flatten()))
        # The last token left takes the place of the picked one.
        left = (left - 1).clamp_min(0)
        pool.scatter_(1, places.gather(1, best), pool.gather(1, left))
    return torch.cat(picks, -1).reshape(*lead, count)


def _check_count(count: int, tokens: int) -> None:
    if not 1 <= count <= tokens:
        raise ValueError(f"count must be from 1 to {tokens} (the tokens given), got {count}.")


def first_best(gains: Tensor) -> Tensor:
    """Lowest index of the largest of ``gains`` along the last axis, ties within ``TIE``."""
    return (gains >= gains.amax(-1, keepdim=True) - TIE).to(gains.dtype).argmax(-1)
