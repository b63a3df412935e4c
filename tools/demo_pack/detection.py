"""Lets the stock UNETLoader of an older ComfyUI load a Flux of any width.

ComfyUI reads the width of a Flux model from its weights. Up to some version after 0.3.75 it took
the number of heads for that of the 12 billion model all the same, and so refused any other.
"""

from __future__ import annotations

from typing import Any

import comfy.model_detection

_detect = comfy.model_detection.detect_unet_config


def detect_unet_config(*args: Any, **kwargs: Any) -> Any:
    """ComfyUI's detection, then as many heads as the width holds: no change where it knows."""
    config = _detect(*args, **kwargs)
    if config and config.get("image_model") == "flux":
        config["num_heads"] = config["hidden_size"] // sum(config["axes_dim"])
    return config


comfy.model_detection.detect_unet_config = detect_unet_config
