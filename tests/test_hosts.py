"""Both hosts through ComfyUI's own sampling."""

from __future__ import annotations

import pytest
import tiny
import torch
from comfyui_toma.nodes.attach import attach
from comfyui_toma.toma_core.config import MergeConfig

MODELS = {"sdxl": tiny.sdxl, "sd15": tiny.sd15, "flux": tiny.flux}
SCOPES = ["block", "modules", "attention"]


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.mark.parametrize("scope", SCOPES)
def test_changes_the_image_and_stays_finite(model, scope):
    stock = tiny.sample(model, 32, 24)
    merged = tiny.sample(attach(model, MergeConfig(scope=scope)), 32, 24)
    assert torch.isfinite(merged).all()
    assert not torch.equal(stock, merged)
    assert torch.equal(stock, tiny.sample(model, 32, 24))
