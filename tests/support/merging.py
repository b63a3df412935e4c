"""Every way of merging as its node would set it up, for tests of all of them."""

from __future__ import annotations

from typing import Any

from comfyui_toma.nodes.token_merge import METHODS, TokenMergePatchModel
from comfyui_toma.toma_core.config import Matching, MergeConfig, Scope

SCOPES = [scope.value for scope in Scope]
KEEPING = [f"{scope}, detail kept" for scope in SCOPES]
WAYS = [*SCOPES, *KEEPING, *METHODS]
"""ToMA in each of its scopes, without and with kept detail, and the methods that match tokens in
pairs."""
THRESHOLD = 0.5
"""At this cosine the random weights of tiny models merge some tokens and not others."""


def config_of(way: str, ratio: float = 0.5, **changes: Any) -> MergeConfig:
    """Settings of one of ``WAYS`` at which even a picture of few tokens merges some; ratio 0
    switches it off."""
    if way in SCOPES:
        return MergeConfig(ratio=ratio, scope=Scope(way), **changes)
    if way in KEEPING:
        scope = SCOPES[KEEPING.index(way)]
        return MergeConfig(ratio=ratio, scope=Scope(scope), keep_detail=True, **changes)
    matching = Matching(way, threshold=0.0 if ratio else 1.0)
    return MergeConfig(ratio=ratio, scope=Scope.ATTENTION, matching=matching, **changes)


def patch(model: Any, method: str = "CA-ToMe", **changes: Any) -> Any:
    """The MODEL behind the token-merging node, with its own defaults but for ``changes`` and for
    what makes tiny models merge at every level."""
    values = {name: options.get("default") for name, (_, options) in inputs().items()}
    values.update(threshold=THRESHOLD, max_downsample="8")
    values.update(changes, model=model, method=method)
    return TokenMergePatchModel.execute(**values)[0]


def inputs() -> dict[str, Any]:
    """Inputs of the token-merging node by name, as ComfyUI's page gets them."""
    groups = TokenMergePatchModel.INPUT_TYPES()
    return {**groups["required"], **groups.get("optional", {})}
