"""The token-merging node as a graph would run it, for tests of its methods."""

from __future__ import annotations

from typing import Any

from comfyui_toma.nodes.token_merge import TokenMergePatchModel

THRESHOLD = 0.5
"""At this cosine the random weights of tiny models merge some tokens and not others."""


def patch(model: Any, method: str = "CA-ToMe", **changes: Any) -> Any:
    """The MODEL behind the node, with its own defaults but for ``changes`` and for what makes tiny
    models merge at every level."""
    values = {name: options.get("default") for name, (_, options) in inputs().items()}
    values.update(threshold=THRESHOLD, max_downsample="8")
    values.update(changes, model=model, method=method)
    return TokenMergePatchModel.execute(**values)[0]


def inputs() -> dict[str, Any]:
    """The node's inputs by name, as ComfyUI's page gets them."""
    groups = TokenMergePatchModel.INPUT_TYPES()
    return {**groups["required"], **groups.get("optional", {})}
