"""ToMA for ComfyUI: faster SDXL and Flux by merging tokens that are alike."""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """Entry point of ComfyUI's node API; nodes are imported only when ComfyUI asks for them."""
    from .nodes import ToMAExtension

    return ToMAExtension()
