"""Tokens and FLOPs fall exactly as the arithmetic says."""

from __future__ import annotations

import functools

import probe
import pytest
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.toma_core.config import MergeConfig, Scope

# TFLOP of one call at 1024 x 1024, stock and at most at ratio 0.25, 0.5, 0.75 (block scope).
SDXL = {0: 6.76, 0.25: 5.45, 0.5: 4.15, 0.75: 2.95}
FLUX = {0: 74.4, 0.25: 56.0, 0.5: 38.5, 0.75: 22.5}


@pytest.mark.parametrize(
    ("make", "limits"), [(probe.full_sdxl_on_meta, SDXL), (probe.full_flux_on_meta, FLUX)]
)
def test_full_size_models_do_the_work_that_the_ratio_says(make, limits):
    model = make()
    for ratio, limit in limits.items():
        # The first step of a run is the dearest: it chooses destinations at every site.
        counted = probe.count_flops(model, MergeConfig(ratio=ratio), (128, 128))
        if ratio == 0:
            assert counted == pytest.approx(limit, rel=0.01)
        else:
            assert counted <= limit


# At most, of a step between whole ones with kept detail: TFLOP at ratio 0.5, where keys stay whole
# and attention saves less, and MiB kept at ratio 0.75, for each prompt.
KEEPING = {
    probe.full_sdxl_on_meta: probe.Cost(4.35, 235),
    probe.full_flux_on_meta: probe.Cost(42.0, 1600),
}


@pytest.mark.parametrize(
    ("make", "stock"), [(probe.full_sdxl_on_meta, SDXL[0]), (probe.full_flux_on_meta, FLUX[0])]
)
def test_kept_detail_costs_whole_steps_whole_keys_and_memory(make, stock):
    model, size = make(), (128, 128)
    half, most = (MergeConfig(ratio=ratio, keep_detail=True) for ratio in (0.5, 0.75))
    assert probe.cost(model, half, size).tflop == pytest.approx(stock, rel=0.01)
    assert probe.cost(model, half, size, call=2).tflop <= KEEPING[make].tflop
    kept = probe.cost(model, most, size).kept_mib
    assert 0.9 * KEEPING[make].kept_mib < kept <= KEEPING[make].kept_mib


@pytest.fixture(scope="module", params=["sdxl", "flux"])
def counted(request):
    """A model without memory, and TFLOP of its call."""
    few = functools.partial(probe.full_flux_on_meta, double=1, single=2)
    model = few() if request.param == "flux" else probe.full_sdxl_on_meta()
    return model, probe.count_flops(model, MergeConfig(ratio=0), (128, 128))


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("keep_detail", [False, True])
def test_the_saving_that_the_node_says_is_what_a_counter_sees(counted, keep_detail, scope):
    model, stock = counted
    config = MergeConfig(scope=scope, keep_detail=keep_detail)
    seen = probe.cost(model, config, (128, 128), call=2)
    first = stock if keep_detail else seen.tflop
    # 2 %: the counter sees our own merging too.
    assert seen.saving == pytest.approx(2 * stock / (first + seen.tflop), rel=0.02)
    assert seen.saving > 1.04


@pytest.mark.parametrize(("make", "name"), [(tiny.sdxl, "ff"), (tiny.flux, "img_mlp")])
def test_modules_of_another_make_merge_too_though_their_work_is_not_known(make, name, caplog):
    model = make()

    class Opaque(torch.nn.Module):
        """A quantised module that does not tell its shapes."""

        def __init__(self, module):
            super().__init__()
            self.run = lambda x: module(x)

        def forward(self, x):
            return self.run(x)

    for block in model.model.diffusion_model.modules():
        if name in dict(block.named_children()):
            setattr(block, name, Opaque(getattr(block, name)))
    with caplog.at_level("INFO"):
        tiny.sample(attach(model, MergeConfig()), 32, 32)
    (line,) = [message for message in caplog.messages if " tokens in " in message]
    assert "FLOPs" not in line
