"""K5: other ComfyUI versions pass more, pass less, or pass it elsewhere; nothing of ours minds."""

from __future__ import annotations

from functools import wraps

import comfy.ldm.flux.layers as flux_layers
import pytest
import tiny
import torch
from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention, FeedForward
from comfy.patcher_extension import WrapperExecutor
from comfyui_toma.nodes.attach import attach, outer_sample
from comfyui_toma.toma_core.config import MergeConfig
from direct import Direct
from merging import WAYS

MODELS = {"sdxl": tiny.sdxl, "flux": tiny.flux}
BLOCKS = {
    "sdxl": [BasicTransformerBlock],
    "flux": [flux_layers.DoubleStreamBlock, flux_layers.SingleStreamBlock],
}
MODULES = {"sdxl": [CrossAttention, FeedForward], "flux": []}


@pytest.fixture(scope="module")
def models():
    return {name: make() for name, make in MODELS.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_apply_model_is_read_by_name_wherever_its_arguments_stand(models, name, way):
    def second(call, **arguments):
        """Of two calls alike: where detail is kept, the first runs whole."""
        call(**arguments)
        return call(**arguments)

    expected = second(Direct(models[name], way))
    assert torch.equal(expected, second(Direct(models[name], way), positional=True))
    stock = second(Direct(models[name], way, ratio=0))
    assert not torch.equal(expected, stock)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_an_unknown_keyword_reaches_every_block_and_module(models, name, way, monkeypatch):
    """Reports 45, 46 and 48: ``attn_mask``, ``timestep_zero_index`` and ``modulation_dims_img``
    came as new keywords of forward functions."""
    arrived = []

    def of_a_later_version(kind):
        forward = kind.forward

        @wraps(forward)
        def forward_with_more(self, *args, keyword_of_tomorrow=None, **kwargs):
            if keyword_of_tomorrow is not None:
                arrived.append(kind)
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward_with_more)
        call = kind.__call__

        def call_with_more(self, *args, **kwargs):
            return call(self, *args, keyword_of_tomorrow=1, **kwargs)

        monkeypatch.setattr(kind, "__call__", call_with_more)

    expected = Direct(models[name], way)()
    kinds = BLOCKS[name] + MODULES[name]
    for kind in kinds:
        of_a_later_version(kind)
    assert torch.equal(expected, Direct(models[name], way)())
    assert set(arrived) == set(kinds)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_positional_arguments_reach_every_block(models, name, way, monkeypatch):
    """Report 49: "takes from 2 to 3 positional arguments but 4 were given".

    Forwarded whole, whatever merges.
    """
    order = {
        BasicTransformerBlock: ("x", "context", "transformer_options"),
        flux_layers.DoubleStreamBlock: (
            *("img", "txt", "vec", "pe", "attn_mask"),
            *("modulation_dims_img", "modulation_dims_txt", "transformer_options"),
        ),
        flux_layers.SingleStreamBlock: (
            *("x", "vec", "pe", "attn_mask", "modulation_dims", "transformer_options"),
        ),
    }
    received = []

    def by_position(kind):
        call, forward, names = kind.__call__, kind.forward, order[kind]

        @wraps(forward)
        def watched(self, *args, **kwargs):
            options = kwargs.get("transformer_options", args[-1] if args else None)
            received.append("a mark" in options)
            return forward(self, *args, **kwargs)

        def positional(self, *args, **kwargs):
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            return call(self, *(given.get(parameter) for parameter in names))

        monkeypatch.setattr(kind, "forward", watched)
        monkeypatch.setattr(kind, "__call__", positional)

    for kind in BLOCKS[name]:
        by_position(kind)
    image = Direct(models[name], way)(add={"a mark": True})
    assert torch.isfinite(image).all()
    assert received and all(received)


OPTIONAL = [
    *("cond_or_uncond", "uuids", "sigmas", "sample_sigmas", "patches", "patches_replace"),
    *("wrappers", "callbacks", "block", "block_index", "img_slice", "original_shape"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_every_optional_key_may_be_missing_and_unknown_keys_pass(models, name, way, caplog):
    expected = Direct(models[name], way)()
    stock = Direct(models[name], way, ratio=0)()
    more = Direct(models[name], way)(add={"key_of_tomorrow": object(), "patches": {}})
    assert torch.equal(expected, more)
    for key in OPTIONAL:
        caplog.clear()
        direct = Direct(models[name], way)
        image = direct(drop=[key])
        direct.run.finish()
        if key in ("sigmas", "wrappers"):
            # No noise level, or no wrapper of ours: the model runs as it is, and this is said.
            assert torch.equal(image, stock), key
            assert any("Inactive" in message for message in caplog.messages), key
        else:
            assert torch.equal(image, expected), key


def test_a_unet_that_does_not_tell_its_grid_runs_unmerged_and_says_so(models, monkeypatch, caplog):
    """Before Comfy#7482 no ``activations_shape`` existed; report 50 is of the same make."""
    forward = BasicTransformerBlock.forward
    stock = Direct(models["sdxl"], "block", ratio=0)()

    def without_shape(self, x, context=None, transformer_options=None):
        options = {k: v for k, v in transformer_options.items() if k != "activations_shape"}
        return self.forward(x, context=context, transformer_options=options)

    monkeypatch.setattr(BasicTransformerBlock, "__call__", without_shape)
    direct = Direct(models["sdxl"], "block")
    assert torch.equal(direct(), stock)
    direct.run.finish()
    assert BasicTransformerBlock.forward is forward
    assert any("size of the token grid" in message for message in caplog.messages)


@pytest.mark.parametrize("way", WAYS)
def test_flux_blocks_without_image_slice_still_find_the_text(models, way, monkeypatch):
    """``img_slice`` stands in the options of single blocks only since 0.3.4x."""
    expected = Direct(models["flux"], way)()
    call = flux_layers.SingleStreamBlock.__call__

    def without_slice(self, *args, transformer_options, **kwargs):
        options = {k: v for k, v in transformer_options.items() if k != "img_slice"}
        return call(self, *args, transformer_options=options, **kwargs)

    monkeypatch.setattr(flux_layers.SingleStreamBlock, "__call__", without_slice)
    assert torch.equal(expected, Direct(models["flux"], way)())


@pytest.mark.parametrize("by_name", [False, True])
def test_the_sampling_wrapper_finds_sigmas_by_name_and_by_position(models, by_name):
    """The wrapper takes whatever ComfyUI passes on and hands all of it through."""
    model = attach(models["sdxl"], MergeConfig())
    seen = []

    class Guider:
        model_patcher = model
        model_options = model.model_options

    def outer(noise, latent, sampler, sigmas, *rest, **more):
        seen.append((sigmas, rest, more, guider.model_options))
        return "result"

    guider = Guider()
    executor = WrapperExecutor.new_class_executor(outer, guider, [outer_sample])
    sigmas, noise = torch.tensor([1.0, 0.0]), tiny.noise_for(model, 8, 8)
    if by_name:
        result = executor.execute(noise, noise, "sampler", sigmas=sigmas, of_tomorrow=1)
    else:
        result = executor.execute(noise, noise, "sampler", sigmas, "mask", of_tomorrow=1)
    assert result == "result"
    [(got, rest, more, inner_options)] = seen
    assert got is sigmas and more == {"of_tomorrow": 1} and rest == (() if by_name else ("mask",))
    assert inner_options is not model.model_options
    assert guider.model_options is model.model_options


def test_the_prediction_wrapper_hands_everything_through(models):
    direct = Direct(models["sdxl"], "block")
    result = direct.run.calc_cond_batch(lambda *args, **kwargs: (args, kwargs), 1, 2, of_tomorrow=3)
    assert result == ((1, 2), {"of_tomorrow": 3})
