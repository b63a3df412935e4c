"""`python tools examples`: build the example graphs in ComfyUI's own page and save them.

Each becomes `example_workflows/<name>.json`, as the page itself saves a graph, with a picture of
the graph beside it for the template browser.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import demo
from browser import EXAMPLES as FOLDER
from browser import base_directory, drive
from environment import PACK
from example_graphs import EXAMPLES, Graph
from packages import say


def main(argv: list[str]) -> int:
    """Save all examples; returns the exit code."""
    parse(argv)
    from server import Server  # here: it needs the environment

    FOLDER.mkdir(exist_ok=True)
    comfyui = Path(os.environ["COMFYUI_PATH"])
    with (
        base_directory(comfyui) as base,
        Server(comfyui, base, ["toma"], base / "log") as server,
    ):
        server.require(demo.NODE)
        code = save(server.url)
    say(f"{len(EXAMPLES)} graphs in {FOLDER}" if code == 0 else "Not every graph was saved.")
    return code


def save(url: str) -> int:
    """Let ComfyUI's page at `url` save all examples; returns the exit code."""
    examples = {
        name: {"graph": numbered(graph), "note": note} for name, (graph, note) in EXAMPLES.items()
    }
    given = {"pack": url, "examples": examples, "folder": FOLDER}
    return drive([PACK / "tests" / "browser" / "save_examples.mjs"], given)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command has no options."""
    parser = argparse.ArgumentParser(prog="python tools examples", description=__doc__)
    return parser.parse_args(argv)


def numbered(graph: Graph) -> Graph:
    """The graph with numbers as names, as ComfyUI gives them."""
    number = {name: str(index) for index, name in enumerate(graph, 1)}

    def renamed(value: Any) -> Any:
        return [number[value[0]], value[1]] if isinstance(value, list) else value

    return {
        number[name]: {**node, "inputs": {key: renamed(x) for key, x in node["inputs"].items()}}
        for name, node in graph.items()
    }
