"""The example graphs: valid to ComfyUI, and run through its sampling code with tiny models.

`python tools examples` builds and saves them in ComfyUI's own page.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.cldm.cldm
import comfy.controlnet
import comfy.ops
import pytest
import tiny
import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))
EXTRAS = ("canny", "edit_model", "flux", "preview_any", "sd3")
"""Modules of ComfyUI's own nodes that the examples use beside the basic ones."""
SMALL = {"width": 256, "height": 256, "steps": 4}
"""Values that a test changes: pictures and runs as small as they can be."""

every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def classes():
    """All node classes of the examples by name."""
    import nodes

    with mock.patch.dict(nodes.NODE_CLASS_MAPPINGS):  # other tests load the pack themselves
        for module in EXTRAS:
            path = Path(nodes.__file__).parent / "comfy_extras" / f"nodes_{module}.py"
            assert asyncio.run(nodes.load_custom_node(str(path), module_parent="comfy_extras"))
        assert asyncio.run(nodes.load_custom_node(str(ROOT)))
        yield nodes.NODE_CLASS_MAPPINGS


def prompt_of(path: Path) -> dict[str, dict[str, Any]]:
    """A saved graph in the form in which the page sends it to ComfyUI."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    sources = {link[0]: [str(link[1]), link[2]] for link in saved["links"]}
    prompt = {}
    for node in saved["nodes"]:
        if node["type"] == "MarkdownNote":  # for the reader alone
            continue
        values = list(node.get("widgets_values", []))
        inputs = {}
        for slot in node["inputs"]:
            if "widget" in slot:
                inputs[slot["name"]] = values.pop(0)
                if slot["name"] == "seed":
                    values.pop(0)  # what becomes of the seed after a run
            if slot["link"] is not None:
                inputs[slot["name"]] = sources[slot["link"]]
        assert not values, f"{node['type']} holds values that belong to no input"
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def test_there_are_examples_and_each_has_a_picture():
    assert len(EXAMPLES) >= 6
    assert all(path.with_suffix(".jpg").is_file() for path in EXAMPLES)


@every_example
def test_every_node_knows_exactly_its_inputs(path, classes):
    for node in prompt_of(path).values():
        known = classes[node["class_type"]].INPUT_TYPES()
        required, given = set(known["required"]), set(node["inputs"]) - {"upload"}
        assert required <= given <= required | set(known.get("optional", {})), node["class_type"]


@every_example
def test_comfyui_accepts_it(path, classes, monkeypatch, tmp_path):
    import execution
    import folder_paths

    prompt = prompt_of(path)
    inputs = [value for node in prompt.values() for value in node["inputs"].values()]
    models = [x for x in inputs if isinstance(x, str) and x.endswith(".safetensors")]
    (tmp_path / "example.png").touch()  # comes with ComfyUI
    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path))
    monkeypatch.setattr(folder_paths, "get_filename_list", lambda folder: models)
    valid, error, _, node_errors = asyncio.run(execution.validate_prompt("1", prompt, None))
    assert valid and not node_errors, (error, node_errors)


@every_example
def test_it_merges_in_every_pass(path, classes, caplog):
    prompt = prompt_of(path)
    for node in prompt.values():
        node["inputs"].update({key: SMALL[key] for key in SMALL if key in node["inputs"]})
    stand_ins = tiny_stand_ins(is_flux="Flux" in path.stem)

    @functools.cache
    def outputs_of(number: str) -> tuple:
        node = prompt[number]
        inputs = {
            key: outputs_of(value[0])[value[1]] if isinstance(value, list) else value
            for key, value in node["inputs"].items()
        }
        if node["class_type"] in stand_ins:
            return stand_ins[node["class_type"]](**inputs)
        kind = classes[node["class_type"]]
        result = getattr(kind(), kind.FUNCTION)(**inputs)
        return result if isinstance(result, tuple) else result.result

    with caplog.at_level(logging.INFO):
        for number, node in prompt.items():
            if node["class_type"] in ("KSampler", "ToMABenchmark"):
                assert torch.isfinite(outputs_of(number)[0]["samples"]).all()
    said = [record.getMessage() for record in caplog.records if record.name == "toma"]
    ratios = [node["inputs"].get("ratio", node["inputs"].get("ratios")) for node in prompt.values()]
    passes = sum(float(ratio) > 0 for text in ratios if text for ratio in str(text).split(","))
    assert len(said) == passes and all("tokens in" in line for line in said), said


def tiny_stand_ins(is_flux: bool) -> dict[str, Any]:
    """Functions in place of the nodes that read files: models of the same classes, but tiny."""
    model = tiny.flux(guidance=True) if is_flux else tiny.sdxl()
    picture = torch.rand(1, 256, 256, 3)
    return {
        "CheckpointLoaderSimple": lambda ckpt_name: (model, "clip", "vae"),
        "UNETLoader": lambda unet_name, weight_dtype: (model,),
        "DualCLIPLoader": lambda **_: ("clip",),
        "VAELoader": lambda vae_name: ("vae",),
        "LoraLoader": lambda model, clip, **_: (model.clone(), clip),
        "ControlNetLoader": lambda control_net_name: (tiny_control_net(model),),
        "CLIPTextEncode": lambda clip, text: (tiny.conditioning(model, len(text)),),
        "LoadImage": lambda image, upload: (picture, picture[..., 0]),
        "FluxKontextImageScale": lambda image: (image,),
        "VAEEncode": lambda pixels, vae: ({"samples": tiny.noise_for(model, 32, 32)},),
    }


def tiny_control_net(model: Any) -> comfy.controlnet.ControlNet:
    """A control net of the shape of a tiny SDXL."""
    config = dict(model.model.model_config.unet_config)
    for key in ("out_channels", "transformer_depth_output", "dtype", "use_temporal_attention"):
        config.pop(key, None)
    operations = comfy.ops.disable_weight_init
    net = comfy.cldm.cldm.ControlNet(
        hint_channels=3, dtype=torch.float32, operations=operations, **config
    )
    tiny.initialise(net, 7)
    return comfy.controlnet.ControlNet(net.eval(), load_device=torch.device("cpu"))
