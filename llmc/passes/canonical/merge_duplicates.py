"""Merge calls of one op on the same arguments into one call.

    sub(x, mean), …, sub(x, mean)  →  the first of them
Must have: an op without side effects and without randomness.
"""

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from llmc.graph.dead_code import writes_memory
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    first: dict[Any, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not node.users or _has_effects(node):
            continue
        key = (node.target, _key(node.args), _key(tuple(sorted(node.kwargs.items()))))
        known = first.setdefault(key, node)
        if known is not node:
            log.step(f"{node.name} is {known.name}", node, known)
            node.replace_all_uses_with(known)
            graph.graph.erase_node(node)


def _has_effects(node: fx.Node) -> bool:
    is_random = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return writes_memory(node) or is_random


def _key(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_key(v) for v in value)
    # 1, 1.0 and True are equal, yet not the same argument.
    return value if isinstance(value, fx.Node) else (type(value).__name__, repr(value))


def _twice(x: Any) -> Any:
    centred = [torch.ops.aten.sub.Tensor(x, torch.ops.aten.mean.dim(x, [-1], True)) for _ in range(2)]
    return torch.ops.aten.mul.Tensor(*centred)


merge_duplicates = GraphPass(
    "merge_duplicates", _run, Numerics.EXACT, Stage.CAPTURED, examples=(Example(_twice, {"x": ("T", 3)}),)
)
