"""A piece of a graph as a Python function that anyone can read, run and change."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from llmc.debug.region import Region


def function_source(name: str, region: Region, numbers: dict[str, Any]) -> str:
    """`def name(inputs)` that computes the region's outputs. numbers: inputs that are written into it."""
    lines = [f"def {name}(inputs):"]
    for node in region.inputs():
        value = repr(numbers[node.name]) if node.name in numbers else f"inputs[{region.key(node)!r}].clone()"
        lines.append(f"    {node.name} = {value}")
    for node in region.nodes:
        call = f"{_target(node)}({', '.join(_arguments(node))})"
        lines.append(f"    {node.name} = {call}")
    results = ", ".join(f"{label!r}: {node.name}" for label, node in region.outputs)
    lines.append(f"    return {{{results}}}")
    return "\n".join(lines) + "\n"


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if target is torch.ops.aten.view.default:
        # The saved inputs are contiguous, which what was viewed may not have been.
        target = torch.ops.aten.reshape.default
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    module = str(target.__module__).removeprefix("_")
    return f"{module}.{target.__name__}"


def _arguments(node: fx.Node) -> list[str]:
    return [_text(a) for a in node.args] + [f"{name}={_text(a)}" for name, a in node.kwargs.items()]


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(v) for v in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    return str(value) if isinstance(value, torch.dtype | torch.layout | torch.memory_format) else repr(value)
