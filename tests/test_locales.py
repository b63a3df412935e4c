"""Names, tooltips and help pages exist in every language and say what the nodes say.

After a change to a node, `python tools texts` brings the files up to date and names what is left
to translate.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from comfyui_toma.nodes import NODES

ROOT = Path(__file__).resolve().parent.parent

spec = importlib.util.spec_from_file_location("texts", ROOT / "tools" / "texts.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

LANGUAGES = (tool.ENGLISH, *tool.TRANSLATIONS)


@pytest.fixture(scope="module")
def english():
    """The texts of the nodes themselves."""
    return tool.english_texts([node.GET_NODE_INFO_V1() for node in NODES])


def test_english_is_what_the_nodes_say(english):
    assert tool.read(tool.ENGLISH) == english


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_there_and_no_other(language, english):
    texts = tool.read(language)
    assert list(texts) == list(english)
    assert [place for place, text in texts.items() if not text.strip()] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_are_plain(language):
    """The browser reads these signs as syntax, and an item of a list is one line."""
    assert not [text for text in tool.read(language).values() if set("{}@|\n") & set(text)]


@pytest.mark.parametrize("language", tool.TRANSLATIONS)
def test_no_sentence_is_left_in_english(language, english):
    texts = tool.read(language)
    assert not [place for place, text in english.items() if " " in text and texts[place] == text]


@pytest.mark.parametrize("language", LANGUAGES)
def test_help_pages_list_every_input_and_output(language):
    texts = tool.read(language)
    for node in tool.nodes_in(texts):
        page = tool.page_of(node, language)
        assert page.read_text(encoding="utf-8") == tool.with_list(page, texts), page
        assert texts[node, "display_name"] in page.read_text(encoding="utf-8").splitlines()[0]


def test_no_text_is_left_of_a_node_that_is_gone():
    assert {path.name for path in (ROOT / "web" / "docs").iterdir()} == {
        node.GET_SCHEMA().node_id for node in NODES
    }


def test_comfyui_serves_the_texts(tmp_path, monkeypatch):
    # an older ComfyUI's modules stand in its own way once it has imported `nodes`
    monkeypatch.syspath_prepend(os.environ["COMFYUI_PATH"])
    import folder_paths
    from app.custom_node_manager import CustomNodeManager

    (tmp_path / "toma").symlink_to(ROOT, target_is_directory=True)
    monkeypatch.setitem(
        folder_paths.folder_names_and_paths, "custom_nodes", ([str(tmp_path)], set())
    )
    served = CustomNodeManager().build_translations()
    for language in LANGUAGES:
        file = tool.file_of(language)
        assert served[language]["nodeDefs"] == json.loads(file.read_text(encoding="utf-8"))


NODE = {
    "name": "Node",
    "display_name": "A node",
    "description": "Does things.",
    "input": {"required": {"old": ("INT", {"tooltip": "As it was."})}},
    "output_name": ["MODEL"],
    "output_tooltips": ["A model."],
}


def test_a_translation_follows_its_english_text():
    before = tool.english_texts([NODE])
    german = dict.fromkeys(before, "deutsch") | {
        ("Node", "inputs", "old", "tooltip"): "Wie es war."
    }
    inputs = {
        "moved": ("INT", {"tooltip": "As it was."}),
        "old": ("INT", {"tooltip": "Says something new."}),
    }
    now = tool.english_texts([{**NODE, "input": {"optional": inputs}}])
    followed = tool.follow(now, before, german)
    assert followed["Node", "inputs", "moved", "tooltip"] == "Wie es war."
    assert followed["Node", "inputs", "old", "tooltip"] == ""
    assert followed["Node", "inputs", "old", "name"] == "deutsch"
    assert followed["Node", "inputs", "moved", "name"] == ""
