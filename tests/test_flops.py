"""Tokens and FLOPs fall exactly as the arithmetic says."""

from __future__ import annotations

import probe
import pytest
from comfyui_toma.toma_core.config import MergeConfig

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


# At most, at ratio 0.5, of a step between whole ones with kept detail: keys stay whole, so
# attention saves less.
KEEPING = {probe.full_sdxl_on_meta: 4.35, probe.full_flux_on_meta: 42.0}


@pytest.mark.parametrize(
    ("make", "stock"), [(probe.full_sdxl_on_meta, SDXL[0]), (probe.full_flux_on_meta, FLUX[0])]
)
def test_kept_detail_costs_whole_steps_and_whole_keys(make, stock):
    model, config = make(), MergeConfig(ratio=0.5, keep_detail=True)
    assert probe.count_flops(model, config, (128, 128)) == pytest.approx(stock, rel=0.01)
    assert probe.count_flops(model, config, (128, 128), call=2) <= KEEPING[make]
