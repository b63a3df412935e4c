"""`python tools test --browser`: what an artist sees, in a real browser on a real ComfyUI.

A headless Chromium of the system, driven by npm's playwright-core, opens ComfyUI's own page twice:
with the pack, and without it for the console errors that are not ours. `tests/browser` says what
it does there; its pictures are left in `toma-browser`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import demo
from environment import PACK, cache_folder, version_of
from example_graphs import node, place_files
from graph import HELPERS, NODE, graph
from packages import Failed, say

PLAYWRIGHT = "playwright-core@1.64.1"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PACKS = tuple(demo.PACKS)
STOCK_PACKS = ("toma_demo",)
STEPS = 4
EXAMPLES = PACK / "example_workflows"
PRESETS = PACK / "web" / "js" / "presets.json"


def main(argv: list[str]) -> int:
    """Run the browser's tests; returns their exit code."""
    options = parse(argv)
    find_chromium(), playwright()  # before servers start: a person may have to install them
    from server import Server  # here: it needs the environment

    pictures = options.pictures.absolute()
    pictures.mkdir(parents=True, exist_ok=True)
    comfyui = Path(os.environ["COMFYUI_PATH"])
    say(f"Starting ComfyUI {version_of(comfyui)} with the pack, and once more without it")
    with (
        base_directory(comfyui) as base,
        base_directory(comfyui) as stock_base,
        Server(comfyui, base, list(PACKS), pictures / "comfyui.log") as server,
        Server(comfyui, stock_base, list(STOCK_PACKS), pictures / "stock.log") as stock,
    ):
        server.require(NODE, *HELPERS)
        defaults = server.defaults(NODE)
        given = {
            "pack": server.url,
            "stock": stock.url,
            "graph": small_graph(0.5, defaults),
            "stockGraph": small_graph(None, defaults),
            "compareGraph": compare_graph(),
            "mapGraph": map_graph(defaults),
            "defaults": {**defaults, "ratio": 0.5},
            "presets": json.loads(PRESETS.read_text(encoding="utf-8")),
            "values": list({**defaults, "ratio": 0.5}.values()),
            "examples": {path.stem: node_types(path) for path in EXAMPLES.glob("*.json")},
            "pictures": pictures,
        }
        tests = sorted((PACK / "tests" / "browser").glob("*.test.mjs"))
        code = drive(["--test", "--test-reporter=spec", *tests], given)
    print(f"Pictures: {pictures}")
    return code


def parse(argv: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python tools test --browser", description=__doc__)
    about = "folder for screenshots and logs (default ./toma-browser)"
    parser.add_argument("--pictures", type=Path, default="toma-browser", metavar="DIR", help=about)
    return parser.parse_args(argv)


def small_graph(ratio: float | None, defaults: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The demo's graph for one small picture."""
    return graph(ratio, 0, STEPS, ["cat face, sky"], defaults)


def compare_graph() -> dict[str, dict[str, Any]]:
    """The demo's graph with ToMA: Compare in place of the sampler, and what it gives."""
    nodes = small_graph(None, {})
    del nodes["meter"], nodes["report"]
    inputs = {**nodes["sampler"]["inputs"], "model": ["unet", 0], "ratios": "0, 0.5"}
    nodes["sampler"] = node("ToMABenchmark", **inputs)
    nodes["table"] = node("PreviewAny", source=["sampler", 1])
    nodes["plot"] = node("PreviewImage", images=["sampler", 2])
    return nodes


def map_graph(defaults: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The demo's graph with a merge map of its picture."""
    nodes = small_graph(0.5, defaults)
    nodes["map"] = node("ToMAMergeMap", model=["toma", 0], image=["decode", 0])
    nodes["view"] = node("PreviewImage", images=["map", 0])
    return nodes


@contextmanager
def base_directory(comfyui: Path) -> Iterator[Path]:
    """The demo's base directory, with every file that an example names."""
    with demo.base_directory() as base:
        place_files(base, comfyui)
        yield base


def node_types(path: Path) -> list[str]:
    """The types of the nodes of a saved graph, in order."""
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    return sorted(node["type"] for node in nodes)


def drive(arguments: list[str | Path], given: dict[str, Any]) -> int:
    """Run Node.js on scripts that drive a browser; they are told `given`. Returns its exit code."""
    given = {**given, "npm": playwright(), "chromium": find_chromium()}
    environment = {**os.environ, "TOMA_BROWSER": json.dumps(given, default=str)}
    return subprocess.call([program("node"), *map(str, arguments)], env=environment)


def find_chromium() -> str:
    """The system's Chromium or Chrome, or the one that CHROMIUM names."""
    places = filter(None, (os.environ.get("CHROMIUM"), *map(shutil.which, CHROMIUM)))
    found = next(places, None)
    if found is None:
        raise Failed(
            "The browser tests need Chromium or Chrome: install it (on Debian and Ubuntu "
            "`apt install chromium`), or set CHROMIUM to its program."
        )
    return found


def program(name: str) -> str:
    """A program of Node.js."""
    found = shutil.which(name)
    if found is None:
        raise Failed(
            f"The browser tests need {name}: install Node.js 20 or newer with npm (on Debian and "
            "Ubuntu `apt install nodejs npm`)."
        )
    return found


def playwright() -> Path:
    """The folder of playwright-core, installed there once."""
    folder = cache_folder() / PLAYWRIGHT.replace("@", "-")
    if not (folder / "node_modules" / "playwright-core" / "package.json").is_file():
        say(f"Installing {PLAYWRIGHT} (about 10 MB, once) ...")
        folder.mkdir(exist_ok=True)
        npm = [program("npm"), "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
        if subprocess.run([*npm, PLAYWRIGHT], stdout=subprocess.DEVNULL).returncode:
            raise Failed(
                f"npm could not install {PLAYWRIGHT}; its own words are above. Connect to the "
                "network: only the first run needs it."
            )
    return folder
