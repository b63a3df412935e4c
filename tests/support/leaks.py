"""Fingerprints of everything that a patch could leave changed: functions, classes, modules."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import nn

PREFIXES = ("comfy.", "comfy_extras.", "torch.nn.modules.", "torch.nn.functional", "einops.")


def of_code() -> dict[str, Any]:
    """Identity and byte code of every function and class that samplers and models can reach."""
    found: dict[str, Any] = {}
    for name, module in sorted(sys.modules.items()):
        if module is not None and name.startswith(PREFIXES):
            for key, value in sorted(vars(module).items(), key=lambda item: item[0]):
                _note(found, f"{name}.{key}", value)
    hooks = torch.nn.modules.module
    for key, value in vars(hooks).items():
        if key.startswith("_global_") and isinstance(value, dict):
            found[f"hooks.{key}"] = tuple(map(id, value.values()))
    return found


def _note(found: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, type):
        found[name] = id(value)
        for key, member in vars(value).items():
            if key not in ("__dict__", "__weakref__", "__doc__") and not key.startswith("_abc_"):
                _note_function(found, f"{name}.{key}", member)
    else:
        _note_function(found, name, value)


def _note_function(found: dict[str, Any], name: str, value: Any) -> None:
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        code, defaults = function.__code__, function.__defaults__
        found[name] = (id(function), id(code), code.co_code, tuple(map(id, defaults or ())))
    elif callable(value):
        found[name] = id(value)


def of_module(model: nn.Module) -> dict[str, Any]:
    """Attributes of every submodule by identity, hooks included; weights by value."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = of_options(value)
    for key, value in model.state_dict().items():
        found[f"weights {key}"] = value.double().sum().item(), value.dtype, value.data_ptr()
    return found


def of_options(value: Any) -> Any:
    """Model options as plain data: containers by content, the rest by identity."""
    if isinstance(value, dict):
        return {key: of_options(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [of_options(each) for each in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, tuple, type(None))) else id(value)


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names whose fingerprint is another one, or gone; new names count only on request."""
    return [name for name, mark in before.items() if after.get(name) != mark]
