"""Token merging for ComfyUI."""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """Entry point of ComfyUI's node API; nodes are imported only when ComfyUI asks for them."""
    from .nodes import ToMAExtension

    return ToMAExtension()
