"""Records which torch operations run, and which of them wait for or move to another device."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey


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


@functools.cache
def known_to_mps() -> frozenset[str]:
    """Operations that run on Apple's GPUs, by the list from which torch itself is built."""
    folder = Path(torchgen.__file__).parent / "packaged/ATen/native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    kernels = parsed.backend_indices[DispatchKey.MPS].index
    return frozenset(
        function.func.name.name.base + ("_" if function.func.name.name.inplace else "")
        for function in parsed.native_functions
        # Variants with an output to write into are made of those without, whatever these lack.
        if not function.func.is_out_fn()
        and (
            function.has_composite_kernel
            or (function.structured_delegate or function.func.name) in kernels
        )
    )
