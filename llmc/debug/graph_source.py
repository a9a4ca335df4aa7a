"""A piece of a graph as a Python function that anyone can read, run and change."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from llmc.debug.region import Region
from llmc.graph.ranks import OnRanks


def function_source(name: str, region: Region, inputs: Mapping[str, Any]) -> str:
    """`def name(inputs)` that computes the region's outputs. inputs: by region.key; numbers are written into it.

    Where an input differs between ranks (`rank_name`) it runs on all of them, with the functions of llmc.graph.ranks.
    """
    lines = [f"def {name}(inputs):"]
    ranks = any(isinstance(inputs[region.key(node)], OnRanks) for node in region.inputs())
    for node in region.inputs():
        key, value = region.key(node), inputs[region.key(node)]
        if isinstance(value, OnRanks):
            clones = ", ".join(f"inputs[{rank_name(key, rank)!r}].clone()" for rank in range(len(value.values)))
            text = f"OnRanks(({clones},))"
        else:
            text = f"inputs[{key!r}].clone()" if isinstance(value, Tensor) else repr(value)
        lines.append(f"    {node.name} = {text}")
    for node in region.nodes:
        lines.append(f"    {node.name} = {_call_on_ranks(node) if ranks else _call(node)}")
    results = ", ".join(f"{label!r}: {node.name}" for label, node in region.outputs)
    lines.append(f"    return {{{results}}}")
    return "\n".join(lines) + "\n"


def rank_name(key: str, rank: int) -> str:
    """The name under which an input of a rank is saved."""
    return f"{key}.rank{rank}"


def _call(node: fx.Node) -> str:
    arguments = [_text(a) for a in node.args] + [f"{name}={_text(a)}" for name, a in node.kwargs.items()]
    return f"{_target(node)}({', '.join(arguments)})"


def _call_on_ranks(node: fx.Node) -> str:
    args = "".join(f"{_text(a)}, " for a in node.args)
    kwargs = ", ".join(f"{name!r}: {_text(a)}" for name, a in node.kwargs.items())
    return f"call({_target(node)}, ({args}), {{{kwargs}}})"


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if target is torch.ops.aten.view.default:
        # The saved inputs are contiguous, which what was viewed may not have been.
        target = torch.ops.aten.reshape.default
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    module = str(target.__module__).removeprefix("_")
    return f"{module}.{target.__name__}"


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
