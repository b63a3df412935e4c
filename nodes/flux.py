"""Merging in the blocks of ComfyUI's Flux models."""

# The blocks are those of comfy.ldm.flux.layers, for dev, schnell, Fill, Canny, Depth, Redux and
# Kontext. Double blocks hold the picture by itself, single blocks hold text and then the picture;
# the text never merges. What belongs to tokens follows those that are left (followers.py).

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from comfy.ldm.flux.model import Flux
from torch import Tensor, nn

from ..toma_core.plan import Place
from ..toma_core.regions import Grid
from .flux_blocks import DoubleBlock, FluxBlock, Sequence, SingleBlock
from .followers import Followers
from .options import Call
from .overrides import Override
from .run import Run, Site
from .work import FluxWork, Tokens, Work

BLOCKS_PER_SITE = 10
"""Blocks that share a pattern, as many as in the deepest stage of SDXL."""


@dataclass(frozen=True)
class FluxBlocks:
    """Which blocks of a Flux model are left alone, counted from either end."""

    skip_first_double: int = 0
    skip_last_double: int = 0
    skip_first_single: int = 0
    skip_last_single: int = 0


class FluxHost:
    """Merges the double and single blocks of one Flux model.

    Args:
        model: the model.
        run: that the plans belong to.
        chosen: which blocks merge.
    """

    def __init__(self, model: Flux, run: Run, chosen: FluxBlocks) -> None:
        self._patch_size = model.patch_size
        self._work = FluxWork(model)
        self._sequence = Sequence()
        double = _chosen(model.double_blocks, chosen.skip_first_double, chosen.skip_last_double)
        single = _chosen(model.single_blocks, chosen.skip_first_single, chosen.skip_last_single)
        doubles = len(model.double_blocks)
        blocks_per_site = BLOCKS_PER_SITE if run.config.blocks_share_patterns else 1
        self.sites: list[Site] = []
        self._blocks: list[FluxBlock] = []
        for kind, blocks, first in ((DoubleBlock, double, 0), (SingleBlock, single, doubles)):
            for start in range(0, len(blocks), blocks_per_site):
                place = Place(first + blocks[start][0], doubles + len(model.single_blocks))
                site = Site(run, place)
                follow = Followers()
                self.sites.append(site)
                self._blocks += [
                    kind(block, number, site, run, self._sequence, follow)
                    for number, block in blocks[start : start + blocks_per_site]
                ]

    def overrides(self, call: Call) -> list[Override]:
        self._sequence.begin(self._grids(call), call.prompt_tokens)
        return [override for block in self._blocks for override in block.overrides(call)]

    def work(self, call: Call, known: Mapping[nn.Module, Tokens]) -> Work | None:
        tokens = sum(rows * columns for rows, columns in self._grids(call))
        return self._work.of_call(tokens, call.prompt_tokens, known)

    def _grids(self, call: Call) -> tuple[Grid, ...]:
        pictures = [call.arguments["x"], *(call.arguments.get("ref_latents") or [])]
        return tuple(self._grid(picture) for picture in pictures)

    def _grid(self, picture: Tensor) -> Grid:
        """Token grid of a latent; Flux pads odd sides."""
        rows, columns = picture.shape[-2:]
        return -(-rows // self._patch_size), -(-columns // self._patch_size)


def _chosen(blocks: nn.ModuleList, skip_first: int, skip_last: int) -> list[tuple[int, nn.Module]]:
    numbered = list(enumerate(blocks))
    return numbered[skip_first : max(skip_first, len(numbered) - skip_last)]
