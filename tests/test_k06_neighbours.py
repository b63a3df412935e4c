"""K6: beside every other node both effects are there, or ours steps aside and says why."""

from __future__ import annotations

import functools
import itertools

import neighbours
import pytest
import small
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.nodes.report import Report
from matrix import matrix
from merging import SCOPES, WAYS, config_of
from neighbours import NEIGHBOURS, SIZE

ORDERS = ["before ours", "after ours"]
MODELS = {"sdxl": small.sdxl, "flux": tiny.flux}


@pytest.fixture(scope="module")
def models():
    return {name: make() for name, make in MODELS.items()}


@pytest.fixture(autouse=True)
def reports(monkeypatch):
    """Reports of the runs of a test: what merged, and what stayed whole for which reason."""
    found = []
    close = Report.close

    def keep(self, finished):
        found.append(self)
        close(self, finished)

    monkeypatch.setattr(Report, "close", keep)
    return found


def ours(model, way="block", **settings):
    return attach(model, config_of(way, **settings))


class Chain:
    """A graph of some neighbours and perhaps our node, and what came of running it."""

    def __init__(self, model, names, way=None, order="before ours", **settings):
        host = "flux" if tiny.is_flux(model) else "sdxl"
        chosen = [NEIGHBOURS[host][name] for name in names]
        self.calls = [[] for _ in chosen]
        positive, negative = tiny.conditioning(model, 1), tiny.conditioning(model, 2)
        patched = model
        if way and order == "after ours":
            patched = ours(patched, way, **settings)
        for neighbour, calls in zip(chosen, self.calls, strict=True):
            patched = neighbour.patch(patched, calls)
            positive = neighbour.condition(model, positive, calls)
            negative = neighbour.condition(model, negative, calls)
        if way and order == "before ours":
            patched = ours(patched, way, **settings)
        sampling = {"cfg": 3.0}
        for neighbour in chosen:
            sampling.update(neighbour.sampling)
        sampling["steps"] = max([3, *(neighbour.steps for neighbour in chosen)])
        torch.manual_seed(0)
        self.image = tiny.sample(patched, *SIZE, positive=positive, negative=negative, **sampling)

    @property
    def counts(self):
        """How often each neighbour was called."""
        return [len(calls) for calls in self.calls]


NAMED = [(host, name) for host, known in NEIGHBOURS.items() for name in known]
# Every neighbour with the way that is set by default, and a sample of the others.
CASES = [(*one, "block") for one in NAMED]
CASES += matrix([(*one, way) for one in NAMED for way in WAYS[1:]], every=20)


@pytest.mark.parametrize(("host", "name", "way"), CASES)
def test_both_effects_are_there_or_ours_says_why_not(models, reports, caplog, host, name, way):
    model = models[host]
    neighbour = NEIGHBOURS[host][name]
    alone = Chain(model, [name])
    chains = [Chain(model, [name], way, order) for order in ORDERS]
    for chain in chains:
        assert torch.isfinite(chain.image).all()
        assert chain.counts == alone.counts
        # Ours works: the image is not the neighbour's alone, and tokens were merged.
        assert not torch.equal(chain.image, alone.image)
    assert torch.equal(chains[0].image, chains[1].image), "the order of the nodes matters"
    for report in reports:
        assert report.blocks
        for reason in report.reasons:
            assert sum(reason in message for message in caplog.messages) == len(chains)
    # The neighbour works: the image is not ours alone, unless it changes nothing.
    steps, sampling = neighbour.steps, {"cfg": 3.0, **neighbour.sampling}
    # At ratio 0 the chain is what it is without us.
    order = ORDERS[len(name) % 2]
    assert torch.equal(alone.image, Chain(model, [name], way, order, ratio=0).image)
    expected = way
    if neighbour.identity and neighbour.like_scope and way.startswith("block"):
        expected = way.replace("block", neighbour.like_scope)
    mine = tiny.sample(ours(model, expected), *SIZE, steps=steps, **sampling)
    assert torch.equal(mine, chains[0].image) == neighbour.identity


PAIRS = [
    (host, one, other, way)
    for host, known in NEIGHBOURS.items()
    for one, other in itertools.combinations(known, 2)
    for way in WAYS
]


@pytest.fixture(scope="module")
def stock_pairs(models):
    """The chain of a pair without ours, or the error that it fails with; each is made once."""

    @functools.cache
    def make(host, one, other):
        # Ours at ratio 0 goes by no other setting, so each pair meets one way of merging.
        way = WAYS[PAIRS.index((host, one, other, WAYS[0])) // len(WAYS) % len(WAYS)]
        try:
            stock = Chain(models[host], [one, other])
        except Exception as failure:
            with pytest.raises(type(failure)):
                Chain(models[host], [one, other], way, ratio=0)
            return failure
        assert torch.equal(stock.image, Chain(models[host], [one, other], way, ratio=0).image)
        return stock

    return make


@pytest.mark.parametrize(("host", "one", "other", "way"), matrix(PAIRS, every=240))
def test_pairs_of_neighbours_work_with_ours(models, stock_pairs, reports, host, one, other, way):
    """Three nodes at once; a pair that fails by itself must fail the same way with ours."""
    stock = stock_pairs(host, one, other)
    reports.clear()
    if isinstance(stock, Exception):
        with pytest.raises(type(stock)):
            Chain(models[host], [one, other], way)
        return
    chain = Chain(models[host], [one, other], way)
    assert torch.isfinite(chain.image).all()
    assert chain.counts == stock.counts
    [report] = reports
    assert (report.blocks and not torch.equal(stock.image, chain.image)) or report.reasons


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("host", MODELS)
def test_cache_tiles_and_control_all_together(models, reports, host, scope):
    """Report 55: the cache works with tiles, or with a ControlNet; all three together fail.

    Tiles of a control net's full-size hint fail by themselves, so its picture is the area's here.
    """
    names = ["EasyCache", "area", "ControlNet"]
    chain = Chain(models[host], names, scope)
    assert torch.isfinite(chain.image).all()
    assert reports[-1].blocks and not torch.equal(chain.image, Chain(models[host], names).image)
    tiled = Chain(models[host], ["EasyCache", "tiles", "mask"], scope)
    assert torch.isfinite(tiled.image).all() and reports[-1].blocks


@pytest.mark.parametrize("scope", SCOPES)
def test_perturbed_values_of_the_middle_block_are_whole(models, scope):
    """Report 51: a replacer of attention that returns full-length values after a merged query."""
    model = models["sdxl"]
    lengths = {}
    for name in ("PerturbedAttentionGuidance", "values for attention"):
        chain = Chain(model, [name], scope)
        assert torch.isfinite(chain.image).all()
        lengths[name] = {shape[1] for calls in chain.calls for shape in calls}
    # 8 x 16 latents: 4 x 8 tokens at the first level that attends, 2 x 4 below.
    assert lengths["values for attention"] == {32, 8}


@pytest.mark.parametrize("scope", SCOPES)
def test_the_vae_is_untouched_while_merging(models, scope):
    """Report 58: with ToMe on, the VAE stopped tiling. Nothing of ours reaches a VAE."""
    from comfy.ldm.models.autoencoder import AutoencoderKL

    config = {
        "double_z": True,
        "z_channels": 4,
        "resolution": 16,
        "in_channels": 3,
        "out_ch": 3,
        "ch": 32,
        "ch_mult": [1, 2],
        "num_res_blocks": 1,
        "attn_resolutions": [8],
        "dropout": 0.0,
    }
    vae = AutoencoderKL(embed_dim=4, ddconfig=config).eval().requires_grad_(False)
    tiny.initialise(vae)
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    before = vae.decode(latent)
    during = []
    tiny.sample(
        ours(models["sdxl"], scope), *SIZE, callback=lambda *_: during.append(vae.decode(latent))
    )
    assert len(during) == 3 and all(torch.equal(before, one) for one in during)


@pytest.mark.parametrize("scope", ["modules", "attention"])
def test_attention_in_tiles_is_said_to_stay_whole(models, reports, scope):
    """HyperTile cuts the tokens of attention into a batch of tiles."""
    chain = Chain(models["sdxl"], ["HyperTile"], scope)
    [report] = reports
    assert report.reasons == ("another node changed the number of tokens or samples",)
    [blocks] = report._aside.values()
    assert blocks and all(block.endswith("attn1") for block in blocks)
    assert torch.isfinite(chain.image).all()


@pytest.mark.parametrize("host", MODELS)
def test_normalized_attention_guidance_is_not_bypassed(models, host):
    """Report 52: with NAG, the accelerator was silently bypassed."""
    if "NAGuidance" not in NEIGHBOURS[host]:
        assert not neighbours.exists("nodes_nag")
        return
    for scope in SCOPES:
        assert not torch.equal(
            Chain(models[host], ["NAGuidance"], scope).image,
            Chain(models[host], ["NAGuidance"]).image,
        )


class TestTwoOfOurs:
    """Two of our nodes in a row: a later one takes over within its own part of the range."""

    @pytest.mark.parametrize("host", MODELS)
    def test_over_the_same_range_the_later_one_rules(self, models, reports, host):
        alone = tiny.sample(ours(models[host], ratio=0.3), *SIZE)
        both = ours(ours(models[host], "modules", ratio=0.7), ratio=0.3)
        assert torch.equal(alone, tiny.sample(both, *SIZE))
        [_, earlier, later] = reports
        assert earlier.reasons == ("a later node takes over",) and not earlier.blocks
        assert later.blocks and not later.reasons

    @pytest.mark.parametrize("host", MODELS)
    def test_over_parts_of_the_range_each_rules_in_its_own(self, models, reports, host):
        first = {"ratio": 0.7, "end_percent": 0.5}
        second = {"ratio": 0.3, "start_percent": 0.5}
        there = ours(ours(models[host], **first), **second)
        back = ours(ours(models[host], **second), **first)
        image = tiny.sample(there, *SIZE, steps=4)
        assert torch.equal(image, tiny.sample(back, *SIZE, steps=4))
        assert all(report.blocks and not report.reasons for report in reports)
        assert not torch.equal(image, tiny.sample(ours(models[host], **first), *SIZE, steps=4))
        assert not torch.equal(image, tiny.sample(ours(models[host], **second), *SIZE, steps=4))

    @pytest.mark.parametrize("host", MODELS)
    def test_one_at_ratio_0_leaves_the_other_alone(self, models, host):
        alone = tiny.sample(ours(models[host]), *SIZE)
        assert torch.equal(alone, tiny.sample(ours(ours(models[host]), ratio=0), *SIZE))
        assert torch.equal(alone, tiny.sample(ours(ours(models[host], ratio=0)), *SIZE))


@pytest.mark.parametrize("scope", SCOPES)
def test_a_neighbours_patch_in_one_block_leaves_the_others_whole(models, reports, scope):
    """Only the block in which another node works gives way, and the message names it. Where
    self-attention alone would merge, nothing does there, and none is reported."""

    def values(q, k, v, extra_options):
        return v

    model = models["sdxl"].clone()
    model.set_model_attn1_replace(values, "output", 2, 0)
    tiny.sample(ours(model, scope), *SIZE)
    [report] = reports
    stay = {"output 2.0"} if scope == "attention" else set()
    assert len(report.blocks) == 7 - len(stay) and not stay & report.blocks.keys()
    assert (report.reasons != ()) == (scope != "modules")
    if report.reasons:
        assert report._aside == {report.reasons[0]: {"output 2.0"}}
