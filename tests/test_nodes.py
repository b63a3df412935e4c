"""The nodes as ComfyUI loads them: through its own custom-node loader."""

from __future__ import annotations

import ast
import asyncio
import sys
from pathlib import Path

import pytest
import tiny
import torch

ROOT = Path(__file__).resolve().parent.parent
SHARED = [
    "model",
    "ratio",
    "tile_size",
    "reuse_interval",
    "keep_detail",
    "region",
    "scope",
    "weight_interval",
    "start_percent",
    "end_percent",
]
INPUTS = {
    "ToMAPatchModel": [*SHARED, "protect"],
    "ToMAPatchSDXL": [
        *SHARED,
        "max_downsample",
        "input_blocks",
        "middle_block",
        "output_blocks",
        "protect",
    ],
    "ToMAPatchFlux": [
        *SHARED,
        "skip_first_double",
        "skip_last_double",
        "skip_first_single",
        "skip_last_single",
        "protect",
    ],
    "TokenMergePatchModel": [
        "model",
        "method",
        "ratio",
        "threshold",
        "refresh_steps",
        "max_downsample",
        "seed",
        "merge_queries_only",
        "start_percent",
        "end_percent",
    ],
    "ToMABenchmark": [
        "model",
        "positive",
        "negative",
        "latent_image",
        "ratios",
        "seed",
        "steps",
        "cfg",
        "sampler_name",
        "scheduler",
        "denoise",
        "tile_size",
        "reuse_interval",
        "keep_detail",
    ],
    "ToMAMergeMap": ["model", "image", "block", "step"],
}
"""Graphs are saved with these names: they never change and are only added to."""


@pytest.fixture(scope="module")
def classes():
    """The node classes that ComfyUI's loader registers for the pack."""
    import nodes

    for name in INPUTS:
        nodes.NODE_CLASS_MAPPINGS.pop(name, None)
    known = set(nodes.NODE_CLASS_MAPPINGS)
    assert asyncio.run(nodes.load_custom_node(str(ROOT)))
    return {name: node for name, node in nodes.NODE_CLASS_MAPPINGS.items() if name not in known}


def test_comfyui_registers_exactly_these_nodes_and_inputs(classes):
    assert {name: list(_inputs(node)) for name, node in classes.items()} == INPUTS


def _inputs(node):
    groups = node.INPUT_TYPES()
    return {**groups.get("required", {}), **groups.get("optional", {})}


def test_every_input_says_what_it_does(classes):
    for node in classes.values():
        assert node.CATEGORY == "model/ToMA"
        for name, (_, options) in _inputs(node).items():
            assert len(options["tooltip"]) > 20, (node, name)


def test_defaults_of_the_widgets_are_those_of_the_config(classes):
    """But for those that a new node sets for the sake of the picture (docs/quality.md)."""
    from comfyui_toma.toma_core.config import Matching, MergeConfig

    start = MergeConfig(ratio=0.75, reuse_interval=2, keep_detail=True)
    for key, node in classes.items():
        config = MergeConfig() if key == "TokenMergePatchModel" else start
        for name, (_, options) in _inputs(node).items():
            for defaults in (Matching(), config):
                if hasattr(defaults, name):
                    value = getattr(defaults, name)
                    assert options["default"] == getattr(value, "value", value), name
                    break


def test_executing_a_node_patches_a_clone(classes):
    model = tiny.sdxl()
    stock = tiny.sample(model, 24, 32)
    for name in ("ToMAPatchModel", "ToMAPatchSDXL"):
        patched = classes[name].execute(model, ratio=0.5)[0]
        assert not torch.equal(tiny.sample(patched, 24, 32), stock)
        protect = torch.ones(1, 64, 64)
        patched = classes[name].execute(model, ratio=0.5, protect=protect)[0]
        assert torch.equal(tiny.sample(patched, 24, 32), stock)
    assert torch.equal(tiny.sample(model, 24, 32), stock)


def test_the_wrong_node_names_the_right_one(classes):
    with pytest.raises(
        ValueError, match=r"merges SDXL models, but the model is Flux.*ToMA for Flux"
    ):
        classes["ToMAPatchSDXL"].execute(tiny.flux(), ratio=0.5)
    with pytest.raises(
        ValueError, match=r"merges Flux models, but the model is SDXL.*ToMA for SDXL"
    ):
        classes["ToMAPatchFlux"].execute(tiny.sdxl(), ratio=0.5)


def imports_of(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_the_core_imports_torch_and_the_standard_library_only():
    for path in (ROOT / "toma_core").glob("*.py"):
        for name in imports_of(path):
            top = name.split(".")[0]
            assert name.startswith(".") or top == "torch" or top in sys.stdlib_module_names, name


def test_leaves_import_only_the_config_and_hosts_never_one_another():
    allowed = {
        "config": set(),
        "regions": {".config"},
        "selection": {".config"},
        "plan": {".regions"},
        "rows": set(),
        "merge": {".config", ".plan", ".regions", ".rows"},
        "cells": {".config", ".regions"},
        "segments": {".rows"},
        "groups": {".cells", ".plan", ".regions", ".rows", ".segments"},
        "schedule": {".config"},
    }
    for leaf, names in allowed.items():
        own = {name for name in imports_of(ROOT / "toma_core" / f"{leaf}.py") if name[0] == "."}
        assert own <= names, leaf
    assert {".flux", ".flux_blocks"}.isdisjoint(imports_of(ROOT / "nodes" / "unet.py"))
    for part in ("flux", "flux_blocks"):
        assert ".unet" not in set(imports_of(ROOT / "nodes" / f"{part}.py"))


def test_importing_the_pack_imports_no_node():
    names = set(imports_of(ROOT / "__init__.py"))
    assert "torch" not in names and not any(name.startswith("comfy") for name in names)
