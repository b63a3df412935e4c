"""The smallest models of both hosts that still have every level, for tests of many runs."""

from __future__ import annotations

from typing import Any

import tiny


def sdxl() -> Any:
    return tiny.sdxl(
        channel_mult=[1, 2, 2],
        num_res_blocks=[1, 1, 1],
        transformer_depth=[0, 1, 1],
        transformer_depth_middle=1,
        transformer_depth_output=[0, 0, 1, 1, 1, 1],
    )


def sd15() -> Any:
    return tiny.sd15(channel_mult=[1, 1, 1, 1])


def flux() -> Any:
    return tiny.flux()


MODELS = {"sdxl": sdxl, "sd15": sd15, "flux": flux}


def module_inside_a_block(model: Any) -> Any:
    """The feed-forward of the first block, where a test may let something go wrong."""
    for module in model.model.diffusion_model.modules():
        if hasattr(module, "attn2"):
            return module.ff
        if hasattr(module, "img_mlp"):
            return module.img_mlp
    raise ValueError("no transformer block")
