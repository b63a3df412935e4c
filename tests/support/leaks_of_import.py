"""Run as a program: ComfyUI first, then the pack; prints what the import changed.

Prints one line per changed name, then the number of names that were looked at.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [os.environ["COMFYUI_PATH"], str(Path(__file__).parent)]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True

import comfy.ldm.flux.model  # noqa: E402, F401
import comfy.ldm.modules.diffusionmodules.openaimodel  # noqa: E402, F401
import comfy.sample  # noqa: E402, F401
import leaks  # noqa: E402
import torch  # noqa: E402
from comfy_api.latest import io  # noqa: E402, F401

code, state, python_state = leaks.of_code(), torch.get_rng_state(), random.getstate()
path, names = list(sys.path), set(sys.modules)

spec = importlib.util.spec_from_file_location(
    "comfyui_toma", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
)
pack = importlib.util.module_from_spec(spec)
sys.modules["comfyui_toma"] = pack
spec.loader.exec_module(pack)
nodes = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
assert nodes, "the pack has no nodes"
for node in nodes:
    node.GET_SCHEMA()

for name in leaks.changed(code, leaks.of_code()):
    print("changed", name)
if not torch.equal(state, torch.get_rng_state()) or python_state != random.getstate():
    print("changed random state")
if path != sys.path:
    print("changed sys.path")
for name in sorted(set(sys.modules) - names):
    if name.split(".")[0] in ("nodes", "toma_core"):
        print("changed", name, "is importable at the top")
print(len(code))
