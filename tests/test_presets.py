"""Presets name widgets that exist and values that these take; the page gets the same ones."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from comfyui_toma.nodes import ToMAPatchFlux, ToMAPatchModel, ToMAPatchSDXL
from comfyui_toma.nodes.presets import PRESETS
from comfyui_toma.toma_core.config import MergeConfig

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {field.name for field in fields(MergeConfig)}
# the node of the family itself has every widget that a preset of it may fill
NODES = {"SDXL": ToMAPatchSDXL, "Flux": ToMAPatchFlux}
EVERY = [(family, name) for family, presets in PRESETS.items() for name in presets]


def widgets(node):
    """Options of a node's inputs by name."""
    groups = node.INPUT_TYPES()
    inputs = {**groups["required"], **groups["optional"]}
    return {name: options for name, (_, options) in inputs.items()}


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_values_are_those_that_the_widgets_take(family, name):
    preset = PRESETS[family][name]
    known = widgets(NODES[family])
    for widget, value in preset.items():
        options = known[widget]
        assert widget in SETTINGS or widget.startswith("skip_")
        assert type(value) is type(options["default"]), widget
        if not isinstance(value, bool):
            assert options["min"] <= value <= options["max"], widget
    MergeConfig(**{widget: value for widget, value in preset.items() if widget in SETTINGS})


@pytest.mark.parametrize("family", PRESETS)
def test_each_sets_the_same_widgets(family):
    """What a preset gives must not depend on the one before it."""
    names = [set(preset) for preset in PRESETS[family].values()]
    assert all(own == names[0] for own in names)


@pytest.mark.parametrize(
    ("node", "family"), [(ToMAPatchModel, "SDXL"), (ToMAPatchSDXL, "SDXL"), (ToMAPatchFlux, "Flux")]
)
def test_a_new_node_is_balanced(node, family):
    known = widgets(node)
    for name, value in PRESETS[family]["balanced"].items():
        assert known[name]["default"] == value, name


def test_the_page_has_a_word_for_each_in_every_language():
    wanted = {"presets"} | {name for _, name in EVERY}
    for folder in (ROOT / "locales").iterdir():
        texts = json.loads((folder / "main.json").read_text(encoding="utf-8"))["toma"]
        assert set(texts) == wanted and all(texts.values()), folder


def test_the_page_knows_the_nodes_and_the_families():
    script = (ROOT / "web" / "js" / "presets.js").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^  (ToMA\w+): \[(.*)\],?$", script, re.MULTILINE))
    assert {node: re.findall(r"\w+", row) for node, row in rows.items()} == {
        "ToMAPatchModel": list(PRESETS),
        "ToMAPatchSDXL": ["SDXL"],
        "ToMAPatchFlux": ["Flux"],
    }
