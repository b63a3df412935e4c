"""Plans by groups: merge and unmerge as formulas, and padding that attention never sees."""

from __future__ import annotations

import pytest
import torch
from comfyui_toma.toma_core.cells import build_cells
from comfyui_toma.toma_core.config import Matching, MergeConfig
from comfyui_toma.toma_core.groups import Blend, GroupPlan
from comfyui_toma.toma_core.plan import Moment, Place, join_plans
from comfyui_toma.toma_core.planning import build_plan, lay_out
from comfyui_toma.toma_core.schedule import Epoch
from comfyui_toma.toma_core.session import Session
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

GRID = (8, 8)
CA_TOME = MergeConfig(scope="attention", matching=Matching("CA-ToMe", threshold=0.8))


def by_hand(follows, blend=Blend.MEAN):
    """A plan of one row of tokens from the token that each follows, by sample."""
    layout = build_cells(((1, len(follows[0])),), MergeConfig())
    return GroupPlan(layout, torch.tensor(follows), blend)


def unlike_samples():
    """Tokens of three samples that merge very different numbers."""
    noise = torch.randn(3, 64, 6, generator=torch.Generator().manual_seed(1))
    return torch.tensor([3.0, 0.7, 0.0])[:, None, None] + noise


def adaptive_plan(x):
    return build_plan(x, lay_out((GRID,), CA_TOME), CA_TOME)


@pytest.mark.parametrize(
    ("blend", "expected"),
    [
        (Blend.MEAN, [[1.5, 2.0], [5.0, 5.0]]),
        (Blend.PRUNE, [[3.0, 0.0], [5.0, 5.0]]),
        # Mean (1.5, 2) has length 2.5; the longest of the group is 4.
        (Blend.NORM, [[2.4, 3.2], [5.0, 5.0]]),
    ],
)
def test_a_group_becomes_what_its_blend_says(blend, expected):
    plan = by_hand([[0, 1, 0]], blend)
    x = torch.tensor([[[3.0, 0.0], [5.0, 5.0], [0.0, 4.0]]])
    torch.testing.assert_close(plan.merge(x), torch.tensor([expected]))
    assert plan.unmerge(plan.merge(x))[0, 2].tolist() == plan.merge(x)[0, 0].tolist()


def test_opposite_tokens_cancel_to_zero_and_a_lone_token_keeps_its_bits():
    plan = by_hand([[0, 0, 2]], Blend.NORM)
    x = torch.tensor([[[1.0, 2.0], [-1.0, -2.0], [0.1, 0.7]]])
    merged = plan.merge(x)
    assert merged[0, 0].tolist() == [0.0, 0.0]
    assert torch.equal(merged[0, 1], x[0, 2])


@pytest.mark.parametrize("method", ["CA-ToMe", "ToMe"])
def test_the_mean_equals_dense_matrices(method):
    x = unlike_samples()
    config = MergeConfig(scope="attention", matching=Matching(method))
    plan = build_plan(x, lay_out((GRID,), config), config)
    a = torch.nn.functional.one_hot(plan.groups(), plan.merged).float().transpose(1, 2)
    size = a.sum(-1, keepdim=True)
    torch.testing.assert_close(plan.merge(x), a @ x / size.clamp_min(1))
    y = torch.randn(3, plan.merged, 5)
    torch.testing.assert_close(plan.unmerge(y), a.transpose(1, 2) @ y)
    # Every token stands in one group, and only padding has none.
    assert (a.sum(1) == 1).all()
    empty = size.squeeze(-1) == 0
    assert torch.equal(empty, torch.zeros_like(empty) if plan.padding is None else plan.padding)


def test_text_passes_through_whole():
    x = unlike_samples()
    plan = adaptive_plan(x)
    text = torch.randn(3, 5, 6)
    merged = plan.merge(torch.cat((text, x), 1), prefix=5)
    assert torch.equal(merged[:, :5], text) and torch.equal(merged[:, 5:], plan.merge(x))
    assert torch.equal(plan.unmerge(merged, prefix=5)[:, 5:], plan.unmerge(merged[:, 5:]))


def test_samples_of_a_batch_merge_as_many_tokens_as_alone():
    x = unlike_samples()
    plan = adaptive_plan(x)
    counts = [len(groups.unique()) for groups in plan.groups()]
    assert len(set(counts)) == 3 and plan.merged == max(counts)
    assert (~plan.padding).sum(1).tolist() == counts
    for sample, count in enumerate(counts):
        alone = adaptive_plan(x[sample : sample + 1])
        assert alone.padding is None and alone.merged == count
        assert torch.equal(alone.groups()[0], plan.groups()[sample])
        assert torch.equal(alone.positions()[0], plan.positions()[sample, :count])
        assert torch.equal(alone.merge(x[sample : sample + 1])[0], plan.merge(x)[sample, :count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_never_sees_padding(dtype):
    """Whatever stands in a padded place, the outcome has the same bits."""
    x = unlike_samples()
    plan = adaptive_plan(x)
    merged = plan.merge(x).to(dtype)
    assert (merged[plan.padding] == 0).all()

    def attention(tokens, mask):
        heads = tokens[:, None]
        return scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)[:, 0]

    mask = plan.hide_padding(None, dtype)
    assert mask.dtype == dtype and mask.shape == (3, 1, 1, plan.merged)
    filled = merged.masked_fill(plan.padding[..., None], 100.0)
    outcome = plan.unmerge(attention(merged, mask))
    assert torch.equal(outcome, plan.unmerge(attention(filled, mask)))
    for sample in range(3):
        one = x[sample : sample + 1]
        alone = adaptive_plan(one)
        expected = alone.unmerge(attention(alone.merge(one).to(dtype), None))[0]
        tolerance = {"atol": 1e-2, "rtol": 1e-2} if dtype is not torch.float32 else {}
        torch.testing.assert_close(outcome[sample], expected, **tolerance)


def test_padding_is_hidden_under_any_mask_and_no_padding_leaves_it_alone():
    x = unlike_samples()
    plan = adaptive_plan(x)
    keys = 2 + plan.merged
    hidden = torch.nn.functional.pad(plan.padding, (2, 0))
    for mask in (
        torch.ones(3, 4, keys, dtype=torch.bool),
        torch.zeros(3, 4, keys),
        torch.zeros(3, 2, 4, keys, dtype=torch.float16),
    ):
        seen = plan.hide_padding(mask, torch.float32, prefix=2)
        assert seen.dtype == mask.dtype and seen.shape[-2:] == (4, keys)
        is_low = ~seen if mask.dtype is torch.bool else seen < -1e4
        assert torch.equal(is_low, hidden[:, None, None].expand_as(seen))
    alone = adaptive_plan(x[:1])
    assert alone.hide_padding(None, torch.float32) is None
    assert alone.hide_padding(mask, torch.float32) is mask


def test_conditions_join_with_padding_and_keep_their_own_counts():
    x = unlike_samples()
    layout = lay_out((GRID,), CA_TOME)
    parts = [build_plan(x[i : i + 1], layout, CA_TOME) for i in range(3)]
    joined, whole = join_plans(parts), build_plan(x, layout, CA_TOME)
    assert torch.equal(joined.groups(), whole.groups())
    assert torch.equal(joined.padding, whole.padding)
    assert torch.equal(joined.merge(x), whole.merge(x))


def test_a_large_group_in_half_precision_is_the_fp32_mean_rounded_once():
    x = 3000 * torch.randn(1, 64, 8)
    for dtype in (torch.float16, torch.bfloat16):
        plan = by_hand([[0] * 64])
        merged = plan.merge(x.to(dtype))
        assert merged.dtype == dtype
        exact = x.to(dtype).float().mean(1, keepdim=True)
        torch.testing.assert_close(merged.float(), exact, rtol=torch.finfo(dtype).eps, atol=0.5)


class HostWaits(TorchDispatchMode):
    """Counts the operations at which a GPU would make the host wait."""

    names = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "masked_select"}

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in self.names:
            self.waits.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def lists(monkeypatch):
    """Calls of ``tolist``, at each of which a GPU would make the host wait."""
    calls = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: calls.append(1) or tolist(self))
    return calls


def test_the_host_never_waits_within_a_block_and_once_for_all_blocks_between_calls(lists):
    """CA-ToMe asks how many tokens are left once the call that matched them is over."""
    x = unlike_samples()[:2]
    conditions = ("positive", "negative")
    for method in ("ToMe", "ToFu", "CA-ToMe"):
        config = MergeConfig(scope="attention", matching=Matching(method, threshold=0.8))
        session, places = Session(config), [Place(block, 3) for block in range(3)]
        device = torch.device("cpu")
        layout = session.layout((GRID,), device)
        for selection in range(3):
            for _ in range(2):  # the call that matches, and the next
                session.count(device)
                asked = len(lists)
                with HostWaits() as host:
                    for place in places:
                        plan = session.plan(place, conditions, Epoch(selection, 0), layout, x).plan
                        plan.unmerge(plan.merge(x))
                        plan.hide_padding(None, x.dtype)
                assert len(lists) == asked and not host.waits
            assert plan.merged < 64
        assert len(lists) == (3 if method == "CA-ToMe" else 0)


def test_a_find_of_ca_tome_serves_once_it_is_counted():
    """Until then the one before serves or, where there is none, all tokens stay: alone and in any
    grouping of conditions."""
    x = unlike_samples()[:2]
    device = torch.device("cpu")
    session, place = Session(CA_TOME), Place()
    layout = session.layout((GRID,), device)

    def held(epoch, *conditions):
        chosen = [("positive", "negative").index(name) for name in conditions]
        taken = session.held(place, conditions, epoch)
        return taken or session.plan(place, conditions, epoch, layout, x[chosen])

    first, second = Epoch(0, 0), Epoch(1, 0)
    alone = held(first, "positive")
    assert alone.plan.is_identity and alone.waits and not alone.is_new
    assert session.count(device) and not session.count(device)
    # The positive condition has a plan, the negative one waits for its own.
    both = held(first, "positive", "negative")
    assert both.waits and both.is_new
    assert session.held(place, ("positive", "negative"), first) is None
    padding = both.plan.padding.sum(1).tolist()
    assert padding[0] > 0 == padding[1] and both.plan.merged == 64
    session.count(device)
    both = held(first, "positive", "negative")
    assert both.is_new and not both.waits and not held(first, "positive").is_new
    assert torch.equal(both.plan.groups(), adaptive_plan(x).groups())
    # The next find waits behind the one before.
    x = x.flip(0)
    again = held(second, "positive", "negative")
    assert not again.waits and torch.equal(again.plan.groups(), both.plan.groups())
    session.count(device)
    expected = build_plan(x, layout, CA_TOME, Moment(place, second.selection))
    assert torch.equal(held(second, "negative").plan.groups(), expected.groups()[1:])


def test_only_a_plan_in_which_no_sample_merges_is_the_identity():
    apart = torch.eye(64)[None]
    assert adaptive_plan(apart).is_identity
    alike = torch.ones(1, 64, 64)
    both = adaptive_plan(torch.cat((apart, alike)))
    assert both.merged == 64 and not both.is_identity
    assert torch.equal(both.merge(torch.cat((apart, alike)))[0], apart[0])
