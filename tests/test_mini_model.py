"""The demo's model: what trains it is the function that ComfyUI runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture(scope="module")
def mini_flux():
    spec = importlib.util.spec_from_file_location("toma_mini_flux", TOOLS / "mini_flux.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("latent", [(32, 32), (24, 40)])
def test_the_model_that_is_trained_equals_comfyuis_flux(mini_flux, latent):
    file = TOOLS / "mini" / "mini-flux-scenes.safetensors"
    weights = {key: value.float() for key, value in load_file(file).items()}
    trained = mini_flux.MiniFlux(mini_flux.FluxShape.of(mini_flux.current_keys(weights)))
    trained.load_state_dict(mini_flux.current_keys(weights))
    shape = {"hidden_size": 256, "num_heads": 2, "vec_in_dim": 64, "depth_single_blocks": 4}
    comfy = tiny.flux(**shape).model.diffusion_model
    # Newer ComfyUIs name the norms' weights differently.
    keys = {key.replace("norm.weight", "norm.scale"): key for key in comfy.state_dict()}
    current = mini_flux.current_keys(weights)
    comfy.load_state_dict(
        {keys[key.replace("norm.weight", "norm.scale")]: value for key, value in current.items()}
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, *latent, generator=generator)
    context = torch.randn(2, 8, tiny.CONTEXT, generator=generator)
    arguments = (x, torch.tensor([0.1, 0.9]), context, context.sum(1))
    with torch.no_grad():
        torch.testing.assert_close(trained(*arguments), comfy(*arguments), atol=1e-4, rtol=1e-4)
