"""`python tools test`: pytest over `tests/`, against the ComfyUI in COMFYUI_PATH."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OPTIONS = """python tools test [--full] [--browser] [what pytest takes]

  --full     the full matrices and 2,000 random graphs, instead of a fixed sample
  --browser  a real page in a headless Chromium instead; --pictures DIR for its screenshots

What follows is pytest's own help.
"""


def main(argv: list[str]) -> int:
    """Run pytest with `argv`; `--full` sets TOMA_FULL=1, which the long tests look for."""
    if "--browser" in argv:
        import browser

        return browser.main([argument for argument in argv if argument != "--browser"])
    if "--full" in argv:
        argv = [argument for argument in argv if argument != "--full"]
        os.environ["TOMA_FULL"] = "1"
    # ComfyUI has modules of its own named `server` and `nodes`: neither this folder nor the
    # pack's root may be where an import looks.
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != FOLDER]
    os.chdir(FOLDER.parent)
    # pytest would take the exception that a request to end raises for the failure of a test
    for request in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, request):
            signal.signal(getattr(signal, request), signal.SIG_DFL)
    import pytest

    if not {"-h", "--help"}.isdisjoint(argv):
        print(OPTIONS)
    print(f"ComfyUI: {os.environ['COMFYUI_PATH']}", flush=True)
    return int(pytest.main(argv))
