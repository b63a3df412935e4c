"""Loads a real ComfyUI (CPU) and the pack as ``comfyui_toma`` before any test module."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACK = "comfyui_toma"

if "COMFYUI_PATH" not in os.environ:
    raise pytest.UsageError("COMFYUI_PATH is not set: run the tests with `python tools test`.")
sys.path[:0] = [os.environ["COMFYUI_PATH"], str(Path(__file__).parent / "support")]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True

spec = importlib.util.spec_from_file_location(
    PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
)
pack = importlib.util.module_from_spec(spec)
sys.modules[PACK] = pack
spec.loader.exec_module(pack)

import torch  # noqa: E402

# Tiny models gain nothing from more threads, and lose much where cores are shared.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def global_rng_is_ours():
    """Every test starts from the same global random state."""
    torch.manual_seed(0)
