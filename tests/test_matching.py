"""Which pairs merge: against the published packages, against the formulas, and by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from comfyui_toma.toma_core.cells import build_cells
from comfyui_toma.toma_core.config import Matching, MergeConfig
from comfyui_toma.toma_core.matching import _generator
from comfyui_toma.toma_core.plan import Moment, Place
from comfyui_toma.toma_core.planning import build_plan, lay_out
from tomesd.merge import bipartite_soft_matching_random2d as tomesd_matching

GRIDS = [(8, 8), (9, 13), (16, 10), (7, 6), (2, 40)]
THIN = [(1, 1), (1, 2), (3, 1), (1, 30), (29, 1), (2, 2), (2, 1)]
METHODS = ["CA-ToMe", "ToMe", "ToFu"]
MOMENT = Moment(Place(0, 2), 0)


def ca_tome_matching():
    """The matching of the ``ca-tome`` package, without its package file, which wants diffusers."""
    folder = importlib.util.find_spec("ca_tome").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("ca_tome_merge", Path(folder) / "merge.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.bipartite_soft_matching_random2d


def config_of(method="ToMe", ratio=0.5, **values):
    return MergeConfig(ratio=ratio, scope="attention", matching=Matching(method, **values))


def plan_of(x, grids, config, moment=MOMENT):
    return build_plan(x, lay_out(grids, config), config, moment)


def features(grids, batch=2, channels=6, seed=0):
    tokens = sum(rows * columns for rows, columns in grids)
    return torch.randn(batch, tokens, channels, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def same_draw(monkeypatch):
    """Lets the packages draw the destinations that ours draws."""

    def draw(grid, seed=0):
        (cells,) = build_cells((grid,), MergeConfig()).cells
        destinations, _ = cells.draw(_generator(seed, MOMENT))
        turn = (cells.members == destinations[:, None]).nonzero()[:, 1]
        turn = turn.reshape(grid[0] // 2, grid[1] // 2, 1)
        monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: turn)

    yield draw


def assert_same_maps(plan, merge, unmerge, x):
    """Equal merged tokens, in whatever order, and equal ways back."""
    ours, theirs = plan.merge(x), merge(x)
    assert ours.shape == theirs.shape
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[mine[:, 0].argsort()], other[other[:, 0].argsort()])
    torch.testing.assert_close(plan.unmerge(ours.tanh()), unmerge(theirs.tanh()))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.75])
def test_tome_equals_tomesd(grid, ratio, same_draw):
    x = features((grid,))
    plan = plan_of(x, (grid,), config_of(ratio=ratio))
    same_draw(grid)
    rows, columns = grid
    merge, unmerge = tomesd_matching(
        x, columns, rows, 2, 2, int(x.shape[1] * ratio), generator=torch.Generator()
    )
    assert_same_maps(plan, merge, unmerge, torch.randn(2, x.shape[1], 5))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_ca_tome_equals_its_package_at_the_count_of_one_sample(grid, threshold, same_draw):
    x = features((grid,), batch=1, channels=3)
    plan = plan_of(x, (grid,), config_of("CA-ToMe", threshold=threshold))
    same_draw(grid)
    rows, columns = grid
    cache = {"compute_on": [0], "merge": None, "unmerge": None}
    merge, unmerge = ca_tome_matching()(
        x, columns, rows, 2, 2, threshold, cache, 0, generator=torch.Generator()
    )
    assert 0 < plan.merged < plan.tokens
    assert_same_maps(plan, merge, unmerge, torch.randn(1, x.shape[1], 5))


def cosine_to_followed(plan, x):
    """``(batch, tokens)`` cosine of every token to the token that stands for its group."""
    kept = plan.positions().gather(1, plan.groups())
    stands = x.gather(1, kept[..., None].expand_as(x))
    return torch.cosine_similarity(x, stands, dim=-1)


def test_no_sample_merges_below_its_threshold_as_in_the_package(same_draw):
    """The package takes the count of the sample that merges most."""
    grid, threshold = (8, 8), 0.9
    plain, busy = torch.ones(1, 64, 6) + 0.1 * features((grid,), 1), features((grid,), 1, seed=1)
    x = torch.cat((plain, busy))
    plan = plan_of(x, (grid,), config_of("CA-ToMe", threshold=threshold))
    assert (cosine_to_followed(plan, x) >= threshold - 1e-6).all()
    left = [len(groups.unique()) for groups in plan.groups()]
    assert left[0] == 16 and left[1] > 50
    same_draw(grid)
    cache = {"compute_on": [0], "merge": None, "unmerge": None}
    merge, _ = ca_tome_matching()(x, 8, 8, 2, 2, threshold, cache, 0, generator=torch.Generator())
    assert merge(x).shape[1] == 16


def test_a_zero_token_is_harmless_where_the_package_makes_nan(same_draw):
    x = features(((8, 8),), 1)
    x[:, 5] = 0
    for method in METHODS:
        plan = plan_of(x, ((8, 8),), config_of(method, threshold=0.2))
        assert torch.isfinite(plan.unmerge(plan.merge(x))).all()
    ours = plan_of(x, ((8, 8),), config_of(ratio=1 / 64))
    assert torch.equal(ours.unmerge(ours.merge(x))[:, 5], x[:, 5])
    # NaN counts as the largest similarity there: the zero token merges first of all.
    same_draw((8, 8))
    merge, unmerge = tomesd_matching(x, 8, 8, 2, 2, 1, generator=torch.Generator())
    assert not torch.equal(unmerge(merge(x))[:, 5], x[:, 5])


def test_thin_grids_merge_where_the_package_fails():
    with pytest.raises((RuntimeError, IndexError)):
        tomesd_matching(features(((1, 30),)), 30, 1, 2, 2, 5, generator=torch.Generator())
    for grid in THIN:
        x = features((grid,))
        for method in METHODS:
            config = config_of(method, ratio=0.75, threshold=0.0)
            plan = plan_of(x, (grid,), config)
            assert plan.unmerge(plan.merge(x)).shape == x.shape
            if method != "CA-ToMe":
                assert plan.merged == x.shape[1] - int(0.75 * x.shape[1])


@pytest.mark.parametrize("grid", [*GRIDS, *THIN, (45, 37), (64, 64)])
def test_each_cell_of_the_true_grid_draws_one_destination(grid):
    rows, columns = grid
    (cells,) = build_cells((grid,), MergeConfig()).cells
    destinations, sources = cells.draw(torch.Generator().manual_seed(1))
    assert sorted([*destinations.tolist(), *sources.tolist()]) == list(range(rows * columns))
    height = min(2 if columns > 1 else 4, rows)
    width = min(2 if rows > 1 else 4, columns)
    at = [(token // columns // height, token % columns // width) for token in destinations.tolist()]
    assert at == [
        (row, column) for row in range(rows // height) for column in range(columns // width)
    ]


def test_all_members_of_a_cell_are_drawn_and_equally_often():
    (cells,) = build_cells(((40, 40),), MergeConfig()).cells
    destinations, _ = cells.draw(torch.Generator().manual_seed(0))
    counts = (cells.members == destinations[:, None]).sum(0)
    assert counts.sum() == 400 and counts.min() > 70


def test_pairs_by_hand():
    """Two cells; tokens point where a reader can see it."""
    right, up = [1.0, 0.0], [0.0, 1.0]
    # Grid of 2 x 4: cell 0 holds tokens 0, 1, 4, 5 and cell 1 tokens 2, 3, 6, 7.
    x = torch.tensor([[right, right, up, up, right, right, up, up]])
    x[0, 0] *= 3
    plan = plan_of(x, ((2, 4),), config_of(ratio=0.75))
    assert plan.merged == 2
    left, other = plan.groups()[0, 0], plan.groups()[0, 2]
    assert plan.groups()[0].tolist() == [left, left, other, other] * 2
    assert plan.merge(x)[0, left].tolist() == [1.5, 0.0]
    assert plan.merge(x)[0, other].tolist() == [0.0, 1.0]


def test_several_grids_are_matched_each_by_itself():
    grids = ((6, 10), (5, 3), (1, 9))
    x = features(grids)
    starts = [0, 60, 75, 84]
    for method in METHODS:
        plan = plan_of(x, grids, config_of(method, threshold=0.2))
        kept = plan.positions().gather(1, plan.groups())
        for low, high in zip(starts, starts[1:], strict=False):
            assert (kept[:, low:high] >= low).all() and (kept[:, low:high] < high).all()
        if method != "CA-ToMe":
            assert plan.merged_per_grid == (30, 8, 5)
        edges = [0, *torch.tensor(plan.merged_per_grid).cumsum(0).tolist()]
        for low, high, first, last in zip(edges, edges[1:], starts, starts[1:], strict=False):
            stand = plan.positions()[:, low:high]
            real = stand if plan.padding is None else stand[~plan.padding[:, low:high]]
            assert (real >= first).all() and (real < last).all()


def test_a_draw_depends_on_seed_block_and_choice_and_on_nothing_else():
    x = features(((8, 8),))
    place, other = Place(0, 4), Place(3, 4)

    def stands(seed, moment):
        return plan_of(x, ((8, 8),), config_of(seed=seed), moment).positions().tolist()

    first = stands(1, Moment(place, 0))
    state = torch.get_rng_state()
    assert stands(2, Moment(place, 0)) != first
    assert stands(1, Moment(place, 1)) != first
    assert stands(1, Moment(other, 0)) != first
    assert stands(1, Moment(Place(0, 4), 0)) == first
    assert torch.equal(torch.get_rng_state(), state)
    # Alone, in an odd batch and beside others, a sample gets the same destinations.
    alone = plan_of(x[1:], ((8, 8),), config_of(seed=1), Moment(place, 0))
    assert alone.positions()[0].tolist() == first[1]


def test_equal_tokens_merge_the_same_way_every_time():
    x = torch.ones(2, 64, 6)
    for method in METHODS:
        first, second = (plan_of(x, ((8, 8),), config_of(method)) for _ in range(2))
        assert torch.equal(first.groups(), second.groups())
        torch.testing.assert_close(first.unmerge(first.merge(x)), x)
