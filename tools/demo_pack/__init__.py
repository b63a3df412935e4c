"""Nodes that only the demo needs: prompts and pictures of the mini model, and a meter.

The demo links this folder into a ComfyUI of its own; the pack itself does not contain it.
"""

from . import detection  # noqa: F401 (it acts when it is imported)
from .meter import ToMADemoMeter, ToMADemoReport
from .mini import ToMADemoDecode, ToMADemoPrompt

NODE_CLASS_MAPPINGS = {
    node.__name__: node for node in (ToMADemoPrompt, ToMADemoDecode, ToMADemoMeter, ToMADemoReport)
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "ToMADemoPrompt": "ToMA demo: prompts",
    "ToMADemoDecode": "ToMA demo: decode",
    "ToMADemoMeter": "ToMA demo: meter",
    "ToMADemoReport": "ToMA demo: report",
}
