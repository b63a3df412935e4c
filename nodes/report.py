"""What a sampling run did, in words for the log."""

from __future__ import annotations

import logging
from collections import Counter

from .options import KEY

_logger = logging.getLogger(KEY)


class Report:
    """Collects which blocks merged how many tokens, and why others did not.

    Args:
        model: name of the model, for people.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._merged: dict[str, tuple[int, int]] = {}
        self._aside: dict[str, set[str]] = {}

    def merged(self, block: str, before: int, after: int) -> None:
        self._merged[block] = (before, after)

    def aside(self, reason: str, block: str = "") -> None:
        """Note that a block (or all, without a name) worked unmerged, wholly or in part."""
        self._aside.setdefault(reason, set()).add(block)

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """Tokens before and after, by block, of the blocks that merged."""
        return dict(self._merged)

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._aside)

    def summary(self) -> str:
        """One line: what merged, or why nothing did."""
        if not self._merged:
            reason = "; ".join(self._aside) or "the model was not called in the chosen range"
            return f"Inactive on {self.model}: {reason}."
        parts = [
            f"{before} -> {after} tokens in {blocks} block{'s' if blocks > 1 else ''}"
            for (before, after), blocks in Counter(self._merged.values()).most_common()
        ]
        return f"{self.model}: {', '.join(parts)}."

    def log(self) -> None:
        """Write the summary and, once per reason, what stayed unmerged."""
        prefix = "ToMA: "
        if not self._merged:
            _logger.warning(prefix + self.summary())
            return
        _logger.info(prefix + self.summary())
        for reason, blocks in self._aside.items():
            names = sorted(filter(None, blocks))
            where = f" ({len(names)} blocks: {names[0]} to {names[-1]})" if names else ""
            _logger.warning("%s%s%s.", prefix, reason, where)
