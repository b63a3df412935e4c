"""Named settings to start from, by family of models.

Their home is `web/js/presets.json`, since ComfyUI's page reads them too: there a preset fills the
widgets of a node, and nothing else ever looks at it.
"""

from __future__ import annotations

import json
from pathlib import Path

Preset = dict[str, float | int | bool]
"""Values of widgets by name."""

_FILE = Path(__file__).parent.parent / "web" / "js" / "presets.json"

PRESETS: dict[str, dict[str, Preset]] = json.loads(_FILE.read_text(encoding="utf-8"))
"""Presets by family, then by name."""
