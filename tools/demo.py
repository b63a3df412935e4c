"""`python tools demo`: the same pictures with and without ToMA, by a real ComfyUI, and the cost.

Every graph holds only stock nodes, our node and the helpers of `demo_pack`. One server runs them
all: first each setting paints while its FLOPs and tokens are counted, then the settings take
turns against the clock in short runs, so that whatever else the machine does hits all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from display import Bar, print_table
from environment import version_of
from graph import HELPERS, METER, MODEL, NODE, graph
from packages import Failed, say

if TYPE_CHECKING:
    from server import Server

TOOLS = Path(__file__).resolve().parent
PACKS = {"toma": TOOLS.parent, "toma_demo": TOOLS / "demo_pack"}
RATIOS = (0.0, 0.25, 0.5, 0.75)
BUSY = 1.5  # a run that is this much slower says that the machine did something else too
PICTURES = ("cat face, bricks", "penguin, night", "strawberry, sky", "birthday cake, checkers")


@dataclass
class Setting:
    """One row: a merge ratio (None: stock ComfyUI, our node not in the graph), what it cost."""

    ratio: float | None
    steps: int
    image: Path | None = None
    tokens: list[int] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    runs: list[list[float]] = field(default_factory=list)  # seconds of each step, a list a run

    @property
    def label(self) -> str:
        return "stock" if self.ratio is None else f"ratio {self.ratio:.2f}"

    @property
    def seconds(self) -> float:
        """Seconds per step, the mean over a run of `steps`.

        Timed runs are shorter: all their steps but the last repeat in a longer one. Each counts
        at its fastest of all runs, since whatever else the machine does only ever adds time.
        """
        *cycle, last = map(min, zip(*self.runs, strict=True))
        repeated = [cycle[step % len(cycle)] for step in range(self.steps - 1)] if cycle else []
        return statistics.fmean([*repeated, last])

    @property
    def tflop(self) -> float:
        """TFLOP of a step: the mean over a run, since not every step chooses destinations."""
        return statistics.fmean(self.flops) / 1e12

    @property
    def tokens_per_block(self) -> int:
        """Image tokens that enter a block: the mean over blocks and steps."""
        return round(statistics.fmean(self.tokens))


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit code."""
    options = parse(argv)
    # now, not above: these need the environment, and `--help` does not
    from server import Server
    from sheet import contact_sheet, psnr

    check_names(options.pictures)
    comfyui = Path(os.environ["COMFYUI_PATH"])
    output = options.output.absolute()
    for folder in (output, options.json and options.json.absolute().parent):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    stock = Setting(None, options.steps)
    settings = [Setting(ratio, options.steps) for ratio in RATIOS]
    with base_directory() as base:
        say(f"Starting ComfyUI {version_of(comfyui)} ({comfyui})")
        with Server(comfyui, base, list(PACKS), output / "comfyui.log") as server:
            server.require(NODE, *HELPERS)
            device = server.ask("GET", "/system_stats")[1]["devices"][0]["type"]
            say(f"It serves {server.url} on the {device}; {options.steps} steps each:")
            measure(server, [stock, *settings], options, output)
            sheet = contact_sheet(
                [(setting.label, setting.image) for setting in settings],
                options.pictures,
                output / "contact-sheet.png",
            )
            rows = [row(setting, settings[0], psnr) for setting in settings]
            print_table(rows)
            explain(stock, len(options.pictures))
            same = psnr(stock.image, settings[0].image) is None
            print(f"Ratio 0 and ComfyUI without our node: {'the same' if same else 'NOT the same'}")
            print(f"Pictures: {output}\nContact sheet: {sheet}")
            if options.json:
                facts = {"comfyui": version_of(comfyui), "device": device, "rows": rows}
                options.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            if options.keep:
                print(f"ComfyUI stays open at {server.url}: Ctrl-C ends it.", flush=True)
                print("Its output folder goes then too: save what you want to keep.", flush=True)
                print(f"Drop {settings[2].image} onto its page to open that graph.", flush=True)
                server.wait()
                raise server.failed("ComfyUI ended by itself")
    if not same:
        raise Failed("Ratio 0 must leave ComfyUI's picture as it is, and it did not.")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python tools demo", description=__doc__)

    def count(text: str) -> int:
        if (number := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
        return number

    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON too")
    parser.add_argument("--keep", action="store_true", help="leave ComfyUI open for the browser")
    parser.add_argument("--steps", type=count, default=20, help="sampling steps (default 20)")
    parser.add_argument("--runs", type=count, default=5, help="timed runs each (default 5)")
    parser.add_argument("--output", type=Path, default=Path("toma-demo"), metavar="FOLDER",
                        help="folder for pictures and log (default ./toma-demo)")  # fmt: skip
    parser.add_argument("--pictures", nargs="+", default=list(PICTURES), metavar="NAME",
                        help="what to paint (tools/mini/README.md has the names)")  # fmt: skip
    return parser.parse_args(argv)


def check_names(pictures: list[str]) -> None:
    """Refuse what the model has never seen: it would paint a blot."""
    from safetensors import safe_open

    with safe_open(TOOLS / "mini" / MODEL, "pt") as weights:
        known = json.loads(weights.metadata()["pictures"])
    for name in pictures:
        if name not in known:
            raise Failed(
                f'--pictures must be names that the model knows, and "{name}" is none: write them '
                f'like "{known[0]}"; tools/mini/README.md lists them all.'
            )


@contextmanager
def base_directory() -> Iterator[Path]:
    """A fresh base directory for ComfyUI: our packs and the mini model linked in."""
    links = {Path("custom_nodes") / name: pack for name, pack in PACKS.items()}
    links[Path("models") / "diffusion_models"] = TOOLS / "mini"
    with tempfile.TemporaryDirectory(prefix="toma-demo-", ignore_cleanup_errors=True) as name:
        base = Path(name).resolve()
        for place, target in links.items():
            (base / place).parent.mkdir(exist_ok=True)
            try:
                (base / place).symlink_to(target, target_is_directory=True)
            except OSError:  # Windows lets only some users make links
                shutil.copytree(target, base / place, ignore=shutil.ignore_patterns(".*"))
        yield base


def measure(
    server: Server, settings: list[Setting], options: argparse.Namespace, output: Path
) -> None:
    """Run every setting once for its picture and counts, then `options.runs` times in turn.

    A timed run is as long as a choice of destinations is kept, and one step more: the last step of
    a run is like no other.
    """
    total = len(settings) * (1 + options.runs)
    defaults = server.defaults(NODE)
    timed_steps = min(options.steps, defaults["reuse_interval"] + 1)
    for turn in range(1 + options.runs):
        steps = timed_steps if turn else options.steps
        for place, setting in enumerate(settings):
            what = f"time {turn} of {options.runs}" if turn else "picture and FLOPs"
            number = turn * len(settings) + place + 1
            progress = Bar(f"[{number:{len(str(total))}}/{total}] {setting.label:11} {what:18}")
            outputs = server.run(
                graph(setting.ratio, turn, steps, options.pictures, defaults), progress
            )
            report = outputs["report"][METER][0]
            if turn:
                setting.runs.append(report["seconds"])
                progress.done(f"{statistics.fmean(report['seconds']):.3f} s per step")
            else:
                setting.flops, setting.tokens = report["flops"], report["tokens"]
                saved = outputs["save"]["images"][0]
                name = setting.label.replace(" ", "-") + ".png"
                setting.image = Path(
                    shutil.copyfile(
                        server.base / "output" / saved["subfolder"] / saved["filename"],
                        output / name,
                    )
                )
                progress.done(name)


def row(setting: Setting, whole: Setting, psnr: Any) -> dict[str, Any]:
    """What was measured of a setting, against `whole`, the setting that merges nothing."""
    return {
        "node": NODE,
        "ratio": setting.ratio,
        "tokens_before": whole.tokens_per_block,
        "tokens_after": setting.tokens_per_block,
        "tflop_per_step": setting.tflop,
        "seconds_per_step": setting.seconds,
        "speedup": whole.seconds / setting.seconds,
        "psnr_db": None if setting is whole else psnr(whole.image, setting.image),
        "image": setting.image.name if setting.image else None,
    }


def explain(stock: Setting, pictures: int) -> None:
    """What the table's numbers are, and how far to trust the times."""
    print(
        f"\nA step paints {pictures} pictures at once, each with and without its prompt. Tokens "
        "and TFLOP (matrix\nproducts and attention, our own included) are means over a run, in "
        "which some steps run whole to\nkeep detail. Seconds: each step at its fastest of "
        f"{len(stock.runs)} runs, taken in turn. ComfyUI without our node:\n"
        f"{stock.tflop:.4f} TFLOP and {stock.seconds:.3f} s per step."
    )
    slowest = max(map(statistics.fmean, stock.runs))
    if slowest > BUSY * stock.seconds:
        print(
            f"The machine was busy: one run without our node took {slowest:.3f} s per step. Times "
            "are better taken\non a quiet machine."
        )
