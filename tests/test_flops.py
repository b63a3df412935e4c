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


# At most, of a step between whole ones with kept detail: keys stay whole, so attention saves less.
SDXL_KEEPING = {0.25: 5.6, 0.5: 4.35, 0.75: 3.1}
FLUX_KEEPING = {0.25: 58.5, 0.5: 42.0, 0.75: 25.5}


@pytest.mark.parametrize(
    ("make", "stock", "limits"),
    [
        (probe.full_sdxl_on_meta, SDXL[0], SDXL_KEEPING),
        (probe.full_flux_on_meta, FLUX[0], FLUX_KEEPING),
    ],
)
def test_kept_detail_costs_whole_steps_and_whole_keys(make, stock, limits):
    model = make()
    for ratio, limit in limits.items():
        config = MergeConfig(ratio=ratio, keep_detail=True)
        whole, merged = (probe.count_flops(model, config, (128, 128), call) for call in (1, 2))
        assert whole == pytest.approx(stock, rel=0.01)
        assert merged <= limit
