"""Make the last product llmc.lm_head, whose logits stay in fp32, and compute what follows it in fp32 too.

    cast(c · tanh(linear(x, weight) / c))  →  c · tanh(lm_head(x, weight) / c)
    cast(linear(x, weight)) · v  →  lm_head(x, weight · v[:, None])                    (v: a weight, one for each token)
    norm(x)  →  cast(norm(x), float32)                                               (rows of texts without a product)
Must have: between the last linear and the logits only pointwise ops with constants; before v only casts.
"""

from typing import Any

import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.graph.source_line import source_line
from llmc.graph.stage import Stage
from llmc.graph.weights import Derived
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

_OPS = torch.ops.llmc
_CAST = torch.ops.aten._to_copy.default
_MUL = torch.ops.aten.mul.Tensor


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    output = graph.graph.output_node()
    chain: list[fx.Node] = []
    logits = graph.logits()
    node: Any = logits
    while node.target in POINTWISE and len(node.all_input_nodes) == 1:
        chain.append(node)
        node = node.all_input_nodes[0]
    previous = node
    node, factor = _without_factor(graph, node)
    if node.target is _OPS.lm_head.default:
        return
    if node.target is not _OPS.linear.default and graph.info.head is not None:
        _return_in_fp32(graph, logits, log)
        return
    if node.target is not _OPS.linear.default:
        raise PassError(
            f"the logits come from {node.target}, expected a linear followed by pointwise ops with constants",
            at=source_line(node) or node.format_node(),
            fix="return the logits of the output projection",
        )
    log.step(f"logits from {node.name}", node)
    arguments = call_arguments(node)
    product = (arguments["x"], *(_times(graph, arguments[name], factor) for name in ("weight", "bias")))
    with graph.graph.inserting_before(output):
        value = graph.graph.call_function(_OPS.lm_head.default, product)
        for link in reversed(chain):
            if link.target is not _CAST:
                args = tuple(value if a is previous else a for a in link.args)
                value = graph.graph.create_node("call_function", link.target, args, dict(link.kwargs))
            previous = link
    if value is not logits:
        output.args = ((value, *graph.returned()[1:]) if graph.side_outputs else value,)


def _without_factor(graph: ModelGraph, node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """(y, v) of cast(y) · v, where v is a weight with a number for each token and y a product with only weights;
    (node, None) of anything else."""
    if node.target is _MUL:
        for x, factor in (node.args[:2], node.args[1::-1]):
            if not isinstance(x, fx.Node) or not isinstance(factor, fx.Node) or factor.name not in graph.weights:
                continue
            if factor.meta["val"].shape == node.meta["val"].shape[-1:]:
                while x.target is _CAST:
                    x = x.all_input_nodes[0]
                if all(operand.name in graph.weights for operand in x.all_input_nodes[1:]):
                    return x, factor
    return node, None


def _times(graph: ModelGraph, weight: fx.Node | None, factor: fx.Node | None) -> fx.Node | None:
    """The weight, each row times its number of `factor`, rounded once."""
    if weight is None or factor is None:
        return weight
    value = weight.meta["val"]
    wide = (("dtype", torch.float32),)
    rows = Derived(_CAST, (graph.weights[weight.name],), wide)
    numbers = Derived(_CAST, (graph.weights[factor.name],), wide)
    shaped = Derived(torch.ops.aten.reshape.default, (numbers, (-1, *[1] * (value.dim() - 1))))
    scaled = Derived(_CAST, (Derived(_MUL, (rows, shaped)),), (("dtype", value.dtype),))
    return new_weight(graph, f"{weight.name}_scaled", scaled, value)


def _return_in_fp32(graph: ModelGraph, rows: fx.Node, log: RewriteLog) -> None:
    """An embedding need not be the result of a product."""
    if rows.meta["val"].dtype is torch.float32:
        return
    log.step(f"return {rows.name} in fp32", rows)
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        value = graph.graph.call_function(_CAST, (rows,), {"dtype": torch.float32})
    output.replace_input_with(rows, value)


def _capped(x: Any, weight: Any) -> Any:
    logits = _OPS.linear.default(x, weight, None)
    return _MUL(torch.ops.aten.tanh.default(_MUL(logits, 0.5)), 2.0)


def _scaled(x: Any, weight: Any, bias: Any, factor: Any) -> Any:
    return _MUL(_OPS.linear.default(x, weight, bias), factor)


_TENSORS = {"x": ("T", 3), "weight": (5, 3)}
_VECTORS = {"bias": (5,), "factor": (5,)}

make_lm_head = GraphPass(
    "make_lm_head",
    _run,
    Numerics.REORDER,
    Stage.CAPTURED,
    examples=(
        Example(_capped, _TENSORS, frozenset({"weight"})),
        Example(_scaled, _TENSORS | _VECTORS, frozenset({"weight", *_VECTORS})),
    ),
)
