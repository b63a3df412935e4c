"""Makes ComfyUI's model classes and this pack importable, with as little else as possible."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PACK = "comfyui_toma"

STAND_INS = (
    "PIL", "comfy_aimdo", "psutil", "scipy", "tokenizers", "torchaudio", "torchsde",
    "torchvision", "tqdm", "transformers", "yaml",
)  # fmt: skip
"""What ComfyUI's model files import and no forward of a UNet or Flux uses: text encoders,
samplers, pictures, progress bars and memory paging. Where one is missing, a stand-in is imported
in its place, and an error rises as soon as anything of it is used. comfy-kitchen is not among
them: from 0.24 on, ComfyUI's Flux turns queries and keys by it."""


class _StandIn(ModuleType):
    """A module whose every name is a class that cannot be made."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise ModuleNotFoundError(f"{self.__name__}.{name} is needed here: install it.")

        return type(name, (), {"__init__": refuse})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last of all finders, so only for what is not installed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = _StandIn(spec.name)
        if spec.name == "psutil":  # ComfyUI asks for the size of memory while it is imported
            memory = SimpleNamespace(total=2**36, available=2**36)
            vars(module)["virtual_memory"] = lambda: memory
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def load_host() -> None:
    """Make ComfyUI (from COMFYUI_PATH) and this pack importable, the pack as `comfyui_toma`.

    The pack's `__init__` files are passed over: they register nodes, which needs the server.

    Raises:
        SystemExit: COMFYUI_PATH is not set.
    """
    if PACK in sys.modules:
        return
    if "COMFYUI_PATH" not in os.environ:
        raise SystemExit("Set COMFYUI_PATH to a ComfyUI folder, or run `python tools bench`.")
    sys.meta_path.append(_StandInFinder())
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    for name, folder in ((PACK, ROOT), (f"{PACK}.nodes", ROOT / "nodes")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    import comfy.cli_args

    comfy.cli_args.args.cpu = not torch.cuda.is_available()
