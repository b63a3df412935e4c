"""What a sampling run did, in words: for the log, and on the node that asked for it."""

from __future__ import annotations

import logging
import statistics
import sys
from collections import Counter

from .options import KEY

_logger = logging.getLogger(KEY)


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
        self._kept_bytes = 0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

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

    def step(self, seconds: float, merging: bool) -> None:
        """Note how long a sampling step took, and whether tokens merged in it."""
        self._seconds[merging].append(seconds)

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """Tokens before and after (the fewest of the run), by block that merged."""
        merged = self._merged if self._merges else {}
        return {block: (before, least) for block, (before, least, _) in merged.items()}

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._aside)

    def summary(self) -> str:
        """One line: what merged and how fast, or why nothing did."""
        if not self._merges:
            reason = "; ".join(self._aside) or "no sampling step lies in the chosen range"
            if self._merged:
                reason = "with keep_detail every step of so short a run stays whole"
            return f"Inactive on {self._subject}: {reason}."
        parts = []
        counts = Counter(before for before, _, _ in self._merged.values())
        for size, blocks in counts.most_common():
            spans = [span for before, *span in self._merged.values() if before == size]
            least, most = min(span[0] for span in spans), max(span[1] for span in spans)
            after = f"{least}" if least == most else f"{least} to {most}"
            parts.append(f"{size} -> {after} tokens in {blocks} block{'s' if blocks > 1 else ''}")
        if self._seconds[True]:
            # Means: a median would hide the whole steps between which detail is kept.
            parts.append(f"{statistics.fmean(self._seconds[True]):.2f} s/step")
            if self._seconds[False]:
                parts[-1] += f" (stock {statistics.fmean(self._seconds[False]):.2f})"
        if self._kept_bytes:
            parts.append(f"{self._kept_bytes / 2**20:.0f} MiB of detail kept")
        return f"{self._subject}: {', '.join(parts)}"

    def show(self) -> None:
        """Put the summary on the node, where a client looks on."""
        show_text(self._node_id, self.summary())

    def close(self) -> None:
        """Put the summary on the node and in the log; there also, once per reason, what stayed."""
        self.show()
        if not self._merges:
            _logger.warning("%s: %s", self._method, self.summary())
            return
        _logger.info("%s: %s", self._method, self.summary())
        for reason, blocks in self._aside.items():
            names = sorted(filter(None, blocks))
            where = f" ({len(names)} blocks: {names[0]} to {names[-1]})" if names else ""
            _logger.warning("%s: %s%s.", self._method, reason, where)


def show_text(node_id: str | None, text: str) -> None:
    """Show ``text`` on a node through ComfyUI's own mechanism; silent without a client."""
    # Looked up, not imported: the server module belongs to a running ComfyUI.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    client = getattr(server, "client_id", None)
    if node_id is not None and client is not None:
        server.send_progress_text(text, node_id, client)
