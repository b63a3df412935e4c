"""Records which torch operations run, and which of them wait for or move to another device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Counts operations by name while it is entered.

    Attributes:
        ops: how often each operation ran.
        moves: operations whose tensors live on more than one device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.moves: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        self.ops[name] += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if torch.is_tensor(leaf)]
        # A number that stands in a tensor of its own may live anywhere.
        if len({tensor.device for tensor in tensors if tensor.ndim}) > 1:
            self.moves.append(name)
        return result
