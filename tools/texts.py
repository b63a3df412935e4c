"""`python tools texts`: names, tooltips and help pages in every language, kept in step.

English is what the nodes themselves say, as a running server tells it. Every other language keeps
what is translated already, also for inputs that several nodes share; what is new or says something
new is left empty in `locales/<language>/nodeDefs.json` and named here, to be filled in by hand.
The first list of each help page, `web/docs/<node>/<language>.md`, is made of the same texts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

PACK = Path(__file__).resolve().parent.parent
ENGLISH = "en"
TRANSLATIONS = ("zh", "ja", "de")
LIST = re.compile(r"^(?:-( .*)?\n)+", re.MULTILINE)

Texts = dict[tuple[str, ...], str]
"""Texts by their place in a file, such as `(node, "inputs", input, "tooltip")`."""


def main(argv: list[str]) -> int:
    """Bring all files up to date; returns 1 where something is left to translate."""
    parse(argv)
    english = english_texts(running_nodes())
    before = read(ENGLISH)
    texts = {ENGLISH: english}
    for language in TRANSLATIONS:
        texts[language] = follow(english, before, read(language))
    left = []
    for language, own in texts.items():
        write(language, own)
        left += [f"{file_of(language)}: {'.'.join(place)}" for place in own if not own[place]]
        for page in (page_of(node, language) for node in nodes_in(english)):
            if page.is_file():
                page.write_text(with_list(page, own), encoding="utf-8")
            else:
                left.append(f"{page}: a heading, how to use it, and `-` alone on a line")
    print("\n".join(["Left to write:", *left]) if left else "Every text is there.")
    return bool(left)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command has no options."""
    return argparse.ArgumentParser(prog="python tools texts", description=__doc__).parse_args(argv)


def running_nodes() -> list[dict[str, Any]]:
    """What a real server tells a browser of the pack's nodes."""
    from demo import base_directory
    from server import Server  # here: it needs the environment

    comfyui = Path(os.environ["COMFYUI_PATH"])
    with base_directory() as base, Server(comfyui, base, ["toma"], base / "log") as server:
        nodes = server.ask("GET", "/object_info")[1].values()
    return [node for node in nodes if node["python_module"] == "custom_nodes.toma"]


def english_texts(nodes: list[dict[str, Any]]) -> Texts:
    """The texts of nodes, given as ComfyUI describes them to the browser."""
    texts: Texts = {}
    for node in nodes:
        name = node["name"]
        texts[name, "display_name"] = node["display_name"]
        texts[name, "description"] = node["description"]
        for group in ("required", "optional"):
            for key, (_, options) in node["input"].get(group, {}).items():
                texts[name, "inputs", key, "name"] = options.get("display_name") or key
                texts[name, "inputs", key, "tooltip"] = options["tooltip"]
        outputs = zip(node["output_name"], node["output_tooltips"], strict=True)
        for number, (output, tooltip) in enumerate(outputs):
            texts[name, "outputs", str(number), "name"] = output
            texts[name, "outputs", str(number), "tooltip"] = tooltip
    return texts


def follow(english: Texts, before: Texts, translated: Texts) -> Texts:
    """Translations for the present English texts, empty where there is none.

    Args:
        english: the present texts.
        before: the English texts at the time of the translation.
        translated: the translation.
    """
    known = {before[place]: text for place, text in translated.items() if place in before and text}
    same = {place for place, text in english.items() if before.get(place) == text}
    return {
        place: (translated.get(place) if place in same else "") or known.get(text, "")
        for place, text in english.items()
    }


def with_list(page: Path, texts: Texts) -> str:
    """A help page whose first list has every input and output in the words of `texts`."""
    node = page.parent.name
    places = [place[:-1] for place in texts if place[0] == node and place[-1] == "tooltip"]
    rows = ""
    for place in places:
        name, key = texts[(*place, "name")], place[-1]
        inner = f" `{key}`" if place[1] == "inputs" and name != key else ""
        rows += f"- **{name}**{inner}: {texts[(*place, 'tooltip')]}\n"
    return LIST.sub(lambda _: rows, page.read_text(encoding="utf-8"), count=1)


def nodes_in(texts: Texts) -> list[str]:
    """The nodes that `texts` are of."""
    return list(dict.fromkeys(place[0] for place in texts))


def file_of(language: str) -> Path:
    """The file in which ComfyUI looks for a language's texts of nodes."""
    return PACK / "locales" / language / "nodeDefs.json"


def page_of(node: str, language: str) -> Path:
    """The file in which ComfyUI looks for a node's help in a language."""
    return PACK / "web" / "docs" / node / f"{language}.md"


def read(language: str) -> Texts:
    """The texts of a language's file, none where there is no file."""
    file = file_of(language)
    return flat(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def write(language: str, texts: Texts) -> None:
    """Make a language's file of `texts`."""
    tree: dict[str, Any] = {}
    for place, text in texts.items():
        folder = tree
        for key in place[:-1]:
            folder = folder.setdefault(key, {})
        folder[place[-1]] = text
    file = file_of(language)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(tree, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def flat(tree: dict[str, Any], above: tuple[str, ...] = ()) -> Texts:
    """The texts of a nested file by their place."""
    texts: Texts = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            texts.update(flat(value, (*above, key)))
        else:
            texts[(*above, key)] = value
    return texts
