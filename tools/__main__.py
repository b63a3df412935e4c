"""`python tools COMMAND`: set-up, demo, tests and training, each in the environment it needs."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from environment import DEFAULT_COMFYUI, Environment, prepare
from packages import COMFYUI_SOURCES, Failed, say

INSIDE = "TOMA_TOOLS_INSIDE"  # set when this file has started itself again inside the environment


@dataclass(frozen=True)
class Command:
    """A command: its module in this folder, with `main(argv) -> int`.

    Attributes:
        imports: what it needs beside what ComfyUI imports.
        parses: its module has `parse(argv)` and imports without the environment, so that a wrong
            option, or `--help`, does not first wait for the set-up.
    """

    summary: str
    module: str = ""
    imports: tuple[str, ...] = ()
    parses: bool = False


COMMANDS = {
    "env": Command("make the environment if it is missing and print it as JSON"),
    "demo": Command("paint with and without ToMA in a real ComfyUI, and measure", "demo"),
    "test": Command("run the tests (--full: the long ones too; --browser: in a real page)",
                    "testing", ("pytest", "hypothesis", "tomesd")),
    "bench": Command("measure speed against stock and other methods", "bench", ("torch",)),
    "claims": Command("count what CA-ToMe claims, on small models", "claims", ("torch",)),
    "quality": Command("measure picture quality against cost, on the mini model", "quality",
                       ("torch",)),
    "train-mini": Command("train a small Flux model like the demo's", "train_mini", ("torch",)),
    "texts": Command("keep names, tooltips and help pages in step with the nodes", "texts"),
    "examples": Command("build the example graphs in ComfyUI's own page", "examples"),
    "artwork": Command("draw the icon and the banner", "artwork"),
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Prepare the environment, step into it and run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python tools",
        usage="python tools COMMAND [--comfyui VERSION] [options of the command]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:12}{command.summary}" for name, command in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    versions = ", ".join(COMFYUI_SOURCES)
    about = f"fetch and use one of {versions} (default: yours, else {DEFAULT_COMFYUI})"
    parser.add_argument("--comfyui", metavar="VERSION", help=about)
    name = parser.parse_args(argv[:1]).command
    shared = argparse.ArgumentParser(f"python tools {name}", add_help=False, allow_abbrev=False)
    shared.add_argument("--comfyui", metavar="VERSION", choices=COMFYUI_SOURCES, help=about)
    options, rest = shared.parse_known_args(argv[1:])
    command = COMMANDS[name]
    if not command.module:
        argparse.ArgumentParser(prog=shared.prog, parents=[shared]).parse_args(rest)
        print(prepare(options.comfyui).as_json())
        return 0
    if command.parses:
        importlib.import_module(command.module).parse(rest)
    environment = prepare(options.comfyui, command.imports)
    os.environ["COMFYUI_PATH"] = str(environment.comfyui_path)
    # torch's threads spin while they wait for one another; where another program has one of the
    # cores, that makes each step up to ten times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if INSIDE in os.environ or str(environment.python) == sys.executable:
        return run(command, rest)
    return step_inside(environment, [name, *rest])


def run(command: Command, argv: list[str]) -> int:
    """Run a command in this process."""
    return importlib.import_module(command.module).main(argv)


def step_inside(environment: Environment, argv: list[str]) -> int:
    """Run this file again with the environment's Python, in place of this process if possible."""
    os.environ[INSIDE] = "1"
    again = [str(environment.python), os.path.dirname(os.path.abspath(__file__)), *argv]
    if os.name == "nt":  # there, exec returns to the shell before the new program is done
        return subprocess.call(again)
    sys.stdout.flush()
    os.execv(again[0], again)


def leave(number: int, _frame: object) -> None:
    """Turn a request to end into an exception, so that every `finally` runs."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for request in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, request):
            signal.signal(getattr(signal, request), leave)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        say("\nStopped.")
        sys.exit(130)
    except Failed as failure:
        say(f"Stopped: {failure}")
        sys.exit(1)
    except OSError as error:
        say(f"Stopped: the system says: {error}.")
        sys.exit(1)
