"""Lets a compiled model run as it is for the span of one call."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch


class _Uncompiled:
    """Compiled models run as they are while it is open, where this torch knows how.

    Choosing tokens within a compiled model would break its graph, and ComfyUI's model functions
    are compiled anew in every step once their graph broke. The stance is the process's: threads of
    several devices open it together, and the last one to close it puts back what was there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1
            # Nothing is compiled where the compiler was never imported, which takes seconds.
            if self._stance is None and "torch._dynamo" in sys.modules:
                set_stance = getattr(torch.compiler, "set_stance", None)
                if set_stance is not None:
                    self._stance = set_stance("force_eager")
                    self._stance.__enter__()

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0 and self._stance is not None:
                self._stance.__exit__(*error)
                self._stance = None


UNCOMPILED = _Uncompiled()
