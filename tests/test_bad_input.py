"""Bad input and unusual hosts: a clear message, or the same as stock; the queue goes on."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from functools import wraps
from pathlib import Path

import comfy.samplers
import comfy.supported_models
import pytest
import small
import tiny
import torch
from comfy.ldm.chroma.model import ChromaParams
from comfyui_toma.nodes.attach import UnsupportedModelError, attach, open_run
from comfyui_toma.nodes.toma import ToMAPatchFlux, ToMAPatchModel, ToMAPatchSDXL
from comfyui_toma.toma_core.config import MergeConfig
from grouping import SPLIT, grouping
from matrix import matrix

NODES = [ToMAPatchModel, ToMAPatchSDXL, ToMAPatchFlux]
SCOPES = ["block", "modules", "attention"]
SIZE = (12, 16)


@pytest.fixture(scope="module")
def models():
    return {name: make() for name, make in small.MODELS.items()}


def run(node, model, **values):
    return node.execute(model, **values).result[0]


def host_of(node):
    return "flux" if node is ToMAPatchFlux else "sdxl"


OUT_OF_RANGE = {
    "ratio": [-0.1, 0.95, 1.0, float("nan"), float("inf"), "half", None, True],
    "tile_size": [0, -1, 65, 8.5, "8"],
    "reuse_interval": [0, 101, 1.5],
    "weight_interval": [0, 101],
    "start_percent": [-0.1, 1.1, float("nan")],
    "end_percent": [-0.1, 1.1],
    "region": ["tiles", "", None],
    "scope": ["blocks", 3],
}


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize(("name", "values"), OUT_OF_RANGE.items())
def test_a_value_out_of_range_names_itself_and_the_range(models, node, name, values):
    """An API graph may hold any value: ComfyUI checks ranges of a graph, not of a call."""
    model = models[host_of(node)]
    for value in values:
        with pytest.raises(ValueError, match=name) as failure:
            run(node, model, **{name: value})
        assert repr(value) in str(failure.value) or str(value) in str(failure.value)
    # The next prompt of the queue works.
    assert torch.isfinite(tiny.sample(run(node, model), *SIZE)).all()


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize(("start", "end"), [(0.5, 0.5), (0.8, 0.2), (1.0, 0.0), (1.0, 1.0)])
def test_a_range_that_ends_before_it_starts_says_what_to_change(models, node, start, end):
    with pytest.raises(ValueError, match="start_percent must be below end_percent") as failure:
        run(node, models[host_of(node)], start_percent=start, end_percent=end)
    assert "Lower start_percent or raise end_percent" in str(failure.value)


@pytest.mark.parametrize("node", NODES)
def test_a_tile_larger_than_the_grid_is_the_whole_grid(models, node):
    model = models[host_of(node)]
    huge = tiny.sample(run(node, model, tile_size=64), *SIZE)
    whole = tiny.sample(run(node, model, region="global"), *SIZE)
    assert torch.equal(huge, whole)


BROKEN = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize(
    ("name", "scope", "bad", "where"),
    matrix(itertools.product(small.MODELS, SCOPES, BROKEN, ["noise", "latent"]), every=5),
)
def test_a_broken_latent_is_sampled_as_stock_and_said_once(models, caplog, name, scope, bad, where):
    """Nothing raises, nothing else is changed, and the next run merges."""
    model = models[name]
    patched = attach(model, MergeConfig(scope=scope))
    expected = tiny.sample(patched, *SIZE)
    noise = tiny.noise_for(model, *SIZE)
    given = {"noise": noise, "latent": torch.zeros_like(noise)}
    given[where][..., 3, 5] = bad
    caplog.clear()
    stock, ours = tiny.sample(model, **given), tiny.sample(patched, **given)
    torch.testing.assert_close(ours, stock, rtol=0, atol=0, equal_nan=True)
    assert not stock.isfinite().all()
    [message] = [record.getMessage() for record in caplog.records if record.name == "toma"]
    assert "Inactive" in message and "the latent holds NaN or inf" in message
    assert torch.equal(expected, tiny.sample(patched, *SIZE))


def _video():
    config = {"image_model": "wan2.1", "model_type": "t2v", "dim": 48, "eps": 1e-6}
    config.update(ffn_dim=64, freq_dim=32, in_dim=16, num_heads=2, num_layers=1, out_dim=16)
    return comfy.supported_models.WAN21_T2V({**config, "patch_size": (1, 2, 2), "text_len": 8})


def _stable_diffusion_3():
    config = {"in_channels": 16, "patch_size": 2, "depth": 1, "num_patches": 64}
    config.update(adm_in_channels=64, input_size=None, pos_embed_max_size=8)
    context = {"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 64}}
    return comfy.supported_models.SD3({**config, "context_embedder_config": context})


def _video_unet():
    """Stable Video Diffusion: a UNet whose tokens are those of many pictures."""
    config = small.MODELS["sdxl"]().model.model_config.unet_config
    config = {key: value for key, value in config.items() if key != "dtype"}
    config.update(adm_in_channels=256 * 3, use_temporal_attention=True, in_channels=8)
    config.update(use_temporal_resblock=True, extra_ff_mix_layer=True, use_spatial_context=True)
    config.update(
        merge_strategy="learned_with_images", merge_factor=0.0, video_kernel_size=[3, 1, 1]
    )
    return comfy.supported_models.SVD_img2vid(config)


def _chroma():
    """Which parameters it has depends on the version of ComfyUI."""
    values = {**tiny.flux_config().unet_config, "txt_ids_dims": [], "vec_in_dim": None}
    values.update(in_dim=64, out_dim=128, hidden_dim=64, n_layers=1)
    known = ChromaParams.__dataclass_fields__
    config = {name: value for name, value in values.items() if name in known}
    return comfy.supported_models.Chroma({**config, "image_model": "chroma"})


UNSUPPORTED = {
    "SD3": _stable_diffusion_3,
    "WAN21_T2V": _video,
    "SVD_img2vid": _video_unet,
    "Chroma": _chroma,
}


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_model_is_refused_by_name(models, node, name):
    """Chroma is a Flux class and Stable Video Diffusion a UNet: alike is not enough."""
    model = tiny.wrap(UNSUPPORTED[name]().get_model({}, ""))
    with pytest.raises(UnsupportedModelError) as failure:
        run(node, model)
    message = str(failure.value)
    assert name in message and "SDXL" in message and "Flux.1" in message
    assert "remove this node" in message
    # Ratio 0 promises nothing and still refuses: a graph does not change its mind with a slider.
    with pytest.raises(UnsupportedModelError):
        run(node, model, ratio=0)
    assert torch.isfinite(tiny.sample(run(node, models[host_of(node)]), *SIZE)).all()


def test_the_wrong_node_names_the_right_one(models):
    with pytest.raises(UnsupportedModelError, match='"ToMA for Flux"'):
        run(ToMAPatchSDXL, models["flux"])
    for name in ("sdxl", "sd15"):
        with pytest.raises(UnsupportedModelError, match='"ToMA for SDXL"'):
            run(ToMAPatchFlux, models[name])


def test_an_error_within_a_run_leaves_no_trace(models):
    model = models["sdxl"]
    patched = attach(model, MergeConfig())
    expected, stock = tiny.sample(patched, *SIZE), tiny.sample(model, *SIZE)

    def fail(*_):
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="disk"):
        tiny.sample(patched, *SIZE, callback=fail)
    assert torch.equal(expected, tiny.sample(patched, *SIZE))
    assert torch.equal(stock, tiny.sample(model, *SIZE))
    assert not any("forward" in vars(m) for m in model.model.diffusion_model.modules())


class TestSeveralDevices:
    """MultiGPU: ComfyUI runs conditions of one step in threads, a copy of the model in each."""

    @pytest.mark.parametrize("scope", SCOPES)
    @pytest.mark.parametrize("name", ["sdxl", "flux"])
    def test_two_threads_share_one_run(self, name, scope):
        """Two models, one sampling run: as ``_calc_cond_batch_multigpu`` calls them, often."""
        first, second = small.MODELS[name](), small.MODELS[name]()
        patched = attach(first, MergeConfig(scope=scope))
        noise = tiny.noise_for(first, *SIZE)
        sigmas = torch.linspace(1.0, 0.0, 5)
        prompts = [tiny.conditioning(first, seed)[0] for seed in (1, 2)]
        widths = {"flux": tiny.FLUX_POOLED, "sdxl": tiny.POOLED + 6 * 256}

        def sample(models, at_once):
            state, options = open_run(patched, patched.model_options, sigmas, SIZE)
            results = {0: [], 1: []}

            def call(index, sigma):
                torch.set_num_threads(1)
                text, extra = prompts[index]
                y = torch.nn.functional.pad(
                    extra["pooled_output"], (0, widths[name] - extra["pooled_output"].shape[1])
                )
                transformer_options = {
                    **options["transformer_options"],
                    "cond_or_uncond": [index],
                    "uuids": [f"condition {index}"],
                    "sigmas": sigma[None],
                    "sample_sigmas": sigmas,
                }
                with torch.no_grad():
                    results[index].append(
                        models[index].model.apply_model(
                            noise,
                            sigma[None],
                            c_crossattn=text,
                            y=y,
                            transformer_options=transformer_options,
                        )
                    )

            def both(sigma):
                # Both ways in threads of their own: numbers of torch are set by thread.
                threads = [threading.Thread(target=call, args=(i, sigma)) for i in (0, 1)]
                for thread in threads:
                    thread.start()
                    if not at_once:
                        thread.join()
                for thread in threads:
                    thread.join()

            for sigma in sigmas[:-1]:
                state.calc_cond_batch(both, sigma)
            [report] = [each.report for each in state._runs]
            assert report.blocks and not report.reasons
            state.close()
            return torch.stack([torch.stack(results[index]) for index in (0, 1)])

        expected = sample([first, first], at_once=False)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            assert torch.equal(expected, sample([first, second], at_once=True))
        finally:
            sys.setswitchinterval(interval)
        for model in (first, second):
            assert not any("forward" in vars(m) for m in model.model.diffusion_model.modules())

    def test_the_core_scheduler_splits_conditions_between_copies(self, monkeypatch):
        """Through the core's own thread pool, where this ComfyUI has one."""
        if not hasattr(comfy.samplers, "_calc_cond_batch_multigpu"):
            # Older versions have no such split: nothing to share.
            assert "multigpu" not in Path(comfy.samplers.__file__).read_text()
            return
        first, second = small.MODELS["sdxl"](), small.MODELS["sdxl"]()
        devices = [torch.device("cpu"), torch.device("cpu", 0)]
        noise = tiny.noise_for(first, *SIZE)
        with grouping(SPLIT):
            expected = tiny.sample(attach(first, MergeConfig()), noise=noise, steps=3)
        calc = comfy.samplers._calc_cond_batch
        pool = comfy.samplers.comfy.multigpu.MultiGPUThreadPool(devices)
        threads = set()
        forward = type(first.model)._apply_model

        @wraps(forward)
        def note(self, *args, **kwargs):
            threads.add(threading.get_ident())
            return forward(self, *args, **kwargs)

        def on_two_devices(model, conds, x_in, timestep, model_options):
            second.model.current_patcher = second
            clones = dict(zip(devices, (first, second), strict=True))
            options = {**model_options, "multigpu_clones": clones, "multigpu_thread_pool": pool}
            return calc(model, conds, x_in, timestep, options)

        monkeypatch.setattr(comfy.samplers, "_calc_cond_batch", on_two_devices)
        monkeypatch.setattr(type(first.model), "_apply_model", note)
        try:
            split = tiny.sample(attach(first, MergeConfig()), noise=noise, steps=3)
        finally:
            pool.shutdown()
        assert len(threads) == 2
        assert torch.equal(expected, split)


def test_the_pack_loads_through_comfyuis_loader_and_its_nodes_run(models):
    """The classes that ComfyUI itself registers refuse and work as those above."""
    import nodes

    root = Path(__file__).resolve().parent.parent
    assert asyncio.run(nodes.load_custom_node(str(root)))
    node = nodes.NODE_CLASS_MAPPINGS["ToMAPatchModel"]
    patched = node.execute(models["sdxl"], ratio=0.5).result[0]
    assert torch.isfinite(tiny.sample(patched, *SIZE)).all()
    with pytest.raises(ValueError, match="ratio must be from 0.0 to 0.9, got 2"):
        node.execute(models["sdxl"], ratio=2)
