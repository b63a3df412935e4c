"""Regions: every token in exactly one region, there and back again."""

from __future__ import annotations

import os

import pytest
import torch
from comfyui_toma.toma_core.config import MergeConfig, Region
from comfyui_toma.toma_core.regions import build_layout

REGIONS = list(Region)


def grids_and_tiles():
    """Every grid from 1x1 to 70x70 with every tile from 1 to 16, or a sample that CI can afford."""
    step = 1 if os.environ.get("TOMA_FULL") else 7
    for rows in range(1, 71):
        for columns in range(1, 71):
            if (rows * 71 + columns) % step == 0 or rows == columns:
                yield rows, columns


@pytest.mark.parametrize("tile_size", range(1, 17))
def test_join_undoes_split_on_every_grid(tile_size):
    config = MergeConfig(tile_size=tile_size)
    for rows, columns in grids_and_tiles():
        layout = build_layout(((rows, columns),), config)
        x = torch.arange(rows * columns, dtype=torch.float32).reshape(1, -1, 1)
        assert torch.equal(layout.join(layout.split(x)), x), (rows, columns)
        assert layout.size <= tile_size**2
        # Tiles are rectangles whose sides differ by at most one token.
        sizes = layout.valid.sum(1)
        low = (rows // -(-rows // tile_size)) * (columns // -(-columns // tile_size))
        assert sizes.sum() == rows * columns
        assert sizes.min() >= low


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.5, 0.75, 0.9])
def test_merged_tokens_are_those_the_ratio_says(region, ratio):
    for grid in [(8, 8), (7, 13), (64, 64), (45, 37), (1, 70), (70, 1), (2, 2), (84, 52)]:
        layout = build_layout((grid,), MergeConfig(ratio=ratio, region=region))
        sizes = layout.valid.sum(1)
        assert ((sizes - layout.counts) - ratio * sizes).abs().max() <= 1
        assert layout.counts.min() >= 1
        assert layout.merged == layout.counts.sum()


def test_an_even_tile_holds_the_rectangle_that_a_reader_expects():
    layout = build_layout(((4, 6),), MergeConfig(tile_size=3))
    # Rows 0..1 and 2..3 (four rows in tiles of at most three), columns 0..2 and 3..5.
    assert layout.index.tolist() == [
        [0, 1, 2, 6, 7, 8],
        [3, 4, 5, 9, 10, 11],
        [12, 13, 14, 18, 19, 20],
        [15, 16, 17, 21, 22, 23],
    ]
    assert layout.uniform and not layout.contiguous


def test_stripes_are_whole_rows_of_about_a_tile():
    layout = build_layout(((64, 64),), MergeConfig(tile_size=8, region="stripe"))
    assert layout.index.tolist() == torch.arange(64 * 64).reshape(64, 64).tolist()
    assert layout.contiguous


def test_non_square_grids_are_not_transposed():
    """Each region covers one rectangle: rows and columns of its tokens make a full product."""
    for grid in [(9, 16), (16, 9), (13, 35), (35, 13), (21, 64), (64, 21)]:
        layout = build_layout((grid,), MergeConfig(tile_size=8))
        for index, valid in zip(layout.index, layout.valid, strict=True):
            tokens = index[valid]
            rows, columns = tokens // grid[1], tokens % grid[1]
            assert len(tokens) == len(rows.unique()) * len(columns.unique())
            assert rows.max() - rows.min() < 8
            assert columns.max() - columns.min() < 8


def test_several_grids_in_one_sequence_never_mix():
    grids = ((6, 10), (5, 3), (16, 16))
    layout = build_layout(grids, MergeConfig(region="global"))
    x = torch.randn(2, layout.tokens, 3)
    assert torch.equal(layout.join(layout.split(x)), x)
    starts = [0, 60, 75, 75 + 256]
    for index, valid, low, high in zip(
        layout.index, layout.valid, starts, starts[1:], strict=False
    ):
        assert index[valid].tolist() == list(range(low, high))
    assert layout.merged_per_grid == (30, 7, 128)


def test_compact_and_expand_keep_every_merged_token():
    layout = build_layout(((45, 37),), MergeConfig(ratio=0.3))
    assert not layout.uniform
    y = torch.randn(2, layout.merged, 3)
    assert torch.equal(layout.compact(layout.expand(y)), y)


@pytest.mark.parametrize("grids", [(), ((0, 4),), ((4, 4), (3, 0))])
def test_an_empty_grid_is_refused(grids):
    with pytest.raises(ValueError, match="at least one row"):
        build_layout(grids, MergeConfig())
