"""Means and maxima over groups of rows: against loops, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from comfyui_toma.toma_core.segments import CHUNK, build_segments

ROWS = [1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 777]


def random_groups(rows, count, batch=3):
    """Groups of every size: sample 0 mixes them, 1 has one for most rows, 2 leaves most empty."""
    generator = torch.Generator().manual_seed(rows + count)
    groups = torch.randint(count, (batch, rows), generator=generator)
    groups[1] = groups[1].where(torch.arange(rows) % 9 == 0, torch.tensor(count // 2))
    groups[2] = groups[2] % 3 * (count // 3)
    return groups


def loop(x, groups, count, function):
    """``function`` of the rows of each group, one by one; zero for an empty group."""
    return torch.stack(
        [
            torch.stack(
                [
                    function(rows[group == g]) if (group == g).any() else torch.zeros(x.shape[-1])
                    for g in range(count)
                ]
            )
            for rows, group in zip(x, groups, strict=True)
        ]
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("count", [1, 3, 40, 2 * CHUNK])
def test_means_and_maxima_equal_a_loop(rows, count):
    groups = random_groups(rows, count)
    segments = build_segments(groups, count)
    x = torch.randn(3, rows, 4)
    mean = segments.mean(x)
    torch.testing.assert_close(mean, loop(x, groups, count, lambda rows: rows.mean(0)))
    values = x[..., :1].abs()
    expected = loop(values, groups, count, lambda rows: rows.amax(0))
    assert torch.equal(segments.largest(values.squeeze(-1)), expected)
    sizes = torch.stack([group.bincount(minlength=count) for group in groups])
    assert torch.equal(segments.sizes.squeeze(-1), sizes)
    assert (mean[sizes == 0] == 0).all()


def test_a_row_by_itself_keeps_its_bits():
    x = torch.randn(1, 200, 5) * torch.logspace(-20, 20, 200)[:, None]
    order = torch.randperm(200)[None]
    mean = build_segments(order, 200).mean(x)
    assert torch.equal(mean[0, order[0]], x[0])


def test_threads_and_neighbours_in_a_batch_change_no_bit():
    """Atomic additions would: their order is left to chance."""
    groups = random_groups(2000, 50)
    x = torch.randn(3, 2000, 32)
    segments = build_segments(groups, 50)
    first = segments.mean(x)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            assert torch.equal(segments.mean(x), first)
    finally:
        torch.set_num_threads(threads)
    for sample in range(3):
        alone = build_segments(groups[sample : sample + 1], 50).mean(x[sample : sample + 1])
        assert torch.equal(alone[0], first[sample])
