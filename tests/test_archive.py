"""The archive that users install: the tracked files, less those that `.comfyignore` names."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"example_workflows", "locales", "nodes", "toma_core", "web"}
MAX_BYTES = 2_000_000


def tracked(*options: str) -> set[str]:
    """Paths of files that git knows."""
    command = ["git", "ls-files", "-z", "--cached", *options]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return set(filter(None, listed.split("\0")))


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A folder `toma` of what a user gets."""
    folder = tmp_path_factory.mktemp("custom_nodes") / "toma"
    for name in tracked() - tracked("--ignored", "--exclude-from=.comfyignore"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_holds_what_the_pack_needs_and_no_more(archive):
    assert {path.name for path in archive.iterdir() if path.is_dir()} == FOLDERS
    for folder in FOLDERS:
        assert {
            path.relative_to(archive).as_posix() for path in (archive / folder).rglob("*.*")
        } == {name for name in tracked() if name.startswith(f"{folder}/")}
    assert sum(path.stat().st_size for path in archive.rglob("*.*")) < MAX_BYTES


def test_comfyui_loads_it(archive):
    import nodes

    with mock.patch.dict(nodes.NODE_CLASS_MAPPINGS):  # other tests load the pack themselves
        assert asyncio.run(nodes.load_custom_node(str(archive)))
        found = [kind for kind in nodes.NODE_CLASS_MAPPINGS if kind.startswith("ToMA")]
    assert {"ToMAPatchModel", "ToMAPatchSDXL", "ToMAPatchFlux"} <= set(found)
    pages = Path(nodes.EXTENSION_WEB_DIRS["toma"]) / "docs"
    assert all((pages / kind / "en.md").is_file() for kind in found)
