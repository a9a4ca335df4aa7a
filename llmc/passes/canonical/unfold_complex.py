"""Write the rotation of pairs of channels as complex numbers in real arithmetic.

    view_as_real(view_as_complex(reshape(x, [..., n, 2])) · polar(1, angles))
        →  stack([a·cos - b·sin, b·cos + a·sin], -1), with a = x[..., 0::2], b = x[..., 1::2]
Must have: pairs of neighbouring channels; a second factor that is polar, perhaps scaled, of which only views are taken.
"""

from typing import Any

import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.render import op_name
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.node_rules import Call, apply_rules
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import tensor_of

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        aten.expand.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.transpose.int,
        aten.unsqueeze.default,
    }
)


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    apply_rules(graph, {aten.view_as_real.default: _rotated}, log)


def _rotated(node: fx.Node) -> Call | Refusal:
    product = node.args[0]
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
        return Refusal("the complex number is not a product", node)
    for pairs, factor in (product.args[:2], product.args[1::-1]):
        x = _pairs(pairs)
        if x is None:
            continue
        angles = _polar(factor, product)
        if isinstance(angles, Refusal):
            return angles
        return _real(x, *angles)
    return Refusal("neither factor is of pairs of neighbouring channels", product)


def _pairs(node: Any) -> fx.Node | None:
    """x of view_as_complex(reshape(x, [..., n, 2]))."""
    inner = node.args[0] if isinstance(node, fx.Node) and node.target is aten.view_as_complex.default else None
    value = tensor_of(inner)
    if not isinstance(inner, fx.Node) or inner.target is not aten.reshape.default or value is None:
        return None
    source = inner.args[0]
    before = tensor_of(source)
    if before is None or not isinstance(source, fx.Node):
        return None
    is_split = value.dim() == before.dim() + 1 and before.shape[-1] == 2 * value.shape[-2] and value.shape[-1] == 2
    return source if is_split else None


def _polar(node: Any, user: fx.Node) -> tuple[Any, Any] | Refusal:
    """Cosines and sines of a complex factor."""
    if not isinstance(node, fx.Node):
        return Refusal(f"the complex factor is {node}", user)
    if node.target is aten.polar.default:
        length, angle = node.args
        parts: tuple[Any, Any] = (Call(aten.cos.default, (angle,)), Call(aten.sin.default, (angle,)))
        if isinstance(length, fx.Node) and length.target is aten.ones_like.default:
            return parts
        return Call(aten.mul.Tensor, (parts[0], length)), Call(aten.mul.Tensor, (parts[1], length))
    is_scaled = node.target is aten.mul.Tensor and isinstance(node.args[1], int | float)
    if node.target not in _VIEWS and not is_scaled:
        return Refusal(f"the complex factor comes from {op_name(node.target)} {node.name}, expected polar", node)
    inner = _polar(node.args[0], node)
    if isinstance(inner, Refusal):
        return inner
    cos, sin = (Call(node.target, (part, *node.args[1:]), dict(node.kwargs)) for part in inner)
    return cos, sin


def _real(x: fx.Node, cos: Any, sin: Any) -> Call:
    value = x.meta["val"]
    last, width = value.dim() - 1, int(value.shape[-1])
    even, odd = (Call(aten.slice.Tensor, (x, last, first, width, 2)) for first in (0, 1))

    def product(a: Any, b: Any) -> Call:
        return Call(aten.mul.Tensor, (a, b))

    first = Call(aten.sub.Tensor, (product(even, cos), product(odd, sin)))
    second = Call(aten.add.Tensor, (product(odd, cos), product(even, sin)))
    return Call(aten.stack.default, ([first, second], last + 1))


unfold_complex = GraphPass(
    "unfold_complex", _run, Numerics.REORDER, Stage.CAPTURED, unproved="complex numbers have no meaning over symbols"
)
