"""The nodes of the pack. Nothing outside this folder imports ComfyUI."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .compare import ToMABenchmark
from .merge_map import ToMAMergeMap
from .token_merge import TokenMergePatchModel
from .toma import ToMAPatchFlux, ToMAPatchModel, ToMAPatchSDXL

NODES: list[type[io.ComfyNode]] = [
    ToMAPatchModel,
    ToMAPatchSDXL,
    ToMAPatchFlux,
    TokenMergePatchModel,
    ToMABenchmark,
    ToMAMergeMap,
]


class ToMAExtension(ComfyExtension):
    """What ComfyUI asks for the pack's nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
