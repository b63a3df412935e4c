"""What a sampling run did, in words: for the log, and on the node that asked for it."""

from __future__ import annotations

import logging
import statistics
import sys
from collections import Counter
from enum import Enum

from .options import KEY
from .work import Work

_logger = logging.getLogger(KEY)


class Step(Enum):
    """What a sampling step was like."""

    MERGED = "on merged tokens"
    WHOLE = "on all tokens, so that detail is kept"
    STOCK = "left alone"


class Report:
    """Collects which blocks merged how many tokens, why others did not, and how long steps took.

    Args:
        subject: model and picture size, for people.
        node_id: node that shows the text, None for none.
        method: name of the method, for people.
    """

    def __init__(self, subject: str, node_id: str | None = None, method: str = "ToMA") -> None:
        self._subject = subject
        self._node_id = node_id
        self._method = method
        self._merged: dict[str, tuple[int, int, int]] = {}
        self._aside: dict[str, set[str]] = {}
        self._merges = False
        self._looks = False
        self._works: list[Work | None] = []
        self._kept_bytes = 0
        self._seconds: list[tuple[Step, float]] = []

    def merged(self, block: str, before: int, after: int) -> None:
        """Note that a block worked on ``after`` tokens instead of ``before``."""
        self._merges = True
        self._note(block, before, after)

    def whole(self, block: str, before: int, after: int) -> None:
        """Note that a block ran whole, so that the next steps can merge and lose little.

        It is noted already as those steps will find it: a compiled step looks at what is noted and
        would be compiled again where that grew.
        """
        self._note(block, before, after)

    def looks(self) -> None:
        """Note that a block ran whole in the step in which it first looked for alike tokens."""
        self._looks = True

    def _note(self, block: str, before: int, after: int) -> None:
        known = self._merged.get(block)
        same = known is not None and known[0] == before
        least, most = known[1:] if same else (after, after)
        self._merged[block] = (before, min(least, after), max(most, after))

    def aside(self, reason: str, block: str = "") -> None:
        """Note that a block (or all, without a name) worked unmerged, wholly or in part."""
        self._aside.setdefault(reason, set()).add(block)

    def keeps(self, size: int) -> None:
        """Note how many bytes of detail are kept now."""
        self._kept_bytes = max(self._kept_bytes, size)

    def works(self, work: Work | None, samples: int) -> None:
        """Note what a call took for each of its samples; None where that is not known."""
        self._works.append(work and Work(samples * work.stock, samples * work.done))

    def step(self, seconds: float, kind: Step) -> None:
        """Note how long a sampling step took, and what it was like."""
        self._seconds.append((kind, seconds))

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """Tokens before and after (the fewest of the run), by block that merged."""
        merged = self._merged if self._merges else {}
        return {block: (before, least) for block, (before, least, _) in merged.items()}

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._aside)

    @property
    def saving(self) -> float:
        """The model's work without merging over what it was; 1 where that is not known."""
        works = [work for work in self._works if work is not None]
        # Other nodes inside the model change its work in ways that are not known.
        if self._aside or not works or len(works) < len(self._works):
            return 1.0
        return sum(work.stock for work in works) / sum(work.done for work in works)

    def summary(self) -> str:
        """One line: what merged and how fast, or why nothing did."""
        if not self._merges:
            reason = "; ".join(self._aside) or "no sampling step lies in the chosen range"
            if self._merged:
                reason = "with keep_detail, every step that this run computed stays whole"
            elif self._looks and not self._aside:
                reason = "alike tokens merge from the second step on, and this run has one"
            return f"Inactive on {self._subject}: {reason}."
        parts = []
        counts = Counter(before for before, _, _ in self._merged.values())
        for size, blocks in counts.most_common():
            spans = [span for before, *span in self._merged.values() if before == size]
            least, most = min(span[0] for span in spans), max(span[1] for span in spans)
            after = f"{least}" if least == most else f"{least} to {most}"
            parts.append(f"{size} -> {after} tokens in {blocks} block{'s' if blocks > 1 else ''}")
        if self.saving > 1:
            parts.append(f"{self.saving:.2f}x fewer FLOPs")
        if speed := self._speed():
            parts.append(speed)
        if self._kept_bytes:
            parts.append(f"{self._kept_bytes / 2**20:.0f} MiB of detail kept")
        return f"{self._subject}: {', '.join(parts)}"

    def _speed(self) -> str:
        """Seconds of a step, beside those of a step on all tokens where there were any."""
        if not self._seconds:
            return ""
        # Means: a median would hide the whole steps between which detail is kept.
        text = f"{statistics.fmean(seconds for _, seconds in self._seconds):.2f} s/step"
        # The first step of a run warms up what lies between the others.
        for name, kind in (("stock", Step.STOCK), ("whole steps", Step.WHOLE)):
            others = [seconds for known, seconds in self._seconds[1:] if known is kind]
            if others:
                return f"{text} ({name} {statistics.fmean(others):.2f})"
        return text

    def show(self) -> None:
        """Put what is known so far on the node, where a client looks on."""
        text = f"{self._subject}: this step runs whole, so that detail is kept; the next ones merge"
        if self._looks:
            text = f"{self._subject}: this step looks for alike tokens; the next ones merge them"
        waits = self._merged or self._looks and not self._aside
        show_text(self._node_id, text if waits and not self._merges else self.summary())

    def close(self, finished: bool = True) -> None:
        """Put the summary on the node and in the log; there also, once per reason, what stayed.

        Args:
            finished: False after an error or an abort, which may be why nothing merged.
        """
        if not (self._merges or finished):
            return
        show_text(self._node_id, self.summary())
        if not self._merges:
            _logger.warning("%s: %s", self._method, self.summary())
            return
        _logger.info("%s: %s", self._method, self.summary())
        for reason, blocks in self._aside.items():
            names = sorted(filter(None, blocks))
            where = f" ({names[0]})" if names else ""
            if len(names) > 1:
                where = f" ({len(names)} blocks: {names[0]} to {names[-1]})"
            _logger.warning("%s: %s%s.", self._method, reason, where)


def show_text(node_id: str | None, text: str) -> None:
    """Show ``text`` on a node through ComfyUI's own mechanism; silent without a client."""
    # Looked up, not imported: the server module belongs to a running ComfyUI.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    client = getattr(server, "client_id", None)
    if node_id is not None and client is not None:
        server.send_progress_text(text, node_id, client)
