"""Write the rotation of pairs of channels as complex numbers in real arithmetic.

    view_as_real(view_as_complex(reshape(x, [..., n, 2])) · polar(1, angles))
        →  stack([a·cos - b·sin, b·cos + a·sin], -1), with a = x[..., 0::2], b = x[..., 1::2]
Must have: pairs of neighbouring channels; a second factor that is polar, perhaps scaled, and read through views only.
"""

from typing import Any

import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refused
from llmc.graph.render import op_name
from llmc.passes.node_rules import Call, Rule, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import shape_of

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


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    return {aten.view_as_real.default: _rotated}


def _rotated(node: fx.Node) -> Call:
    product = node.all_input_nodes[0]
    if product.target is not aten.mul.Tensor:
        raise Refused("the complex number is not a product", node)
    for pairs, factor in (product.args[:2], product.args[1::-1]):
        x = _pairs(pairs)
        if x is not None:
            return _real(x, *_polar(factor, product))
    raise Refused("neither factor is of pairs of neighbouring channels", product)


def _pairs(node: Any) -> fx.Node | None:
    """x of view_as_complex(reshape(x, [..., n, 2]))."""
    inner = node.args[0] if isinstance(node, fx.Node) and node.target is aten.view_as_complex.default else None
    if not isinstance(inner, fx.Node) or inner.target is not aten.reshape.default:
        return None
    source = inner.all_input_nodes[0]
    before, after = shape_of(source), shape_of(inner)
    is_split = len(after) == len(before) + 1 and before[-1] == 2 * after[-2] and after[-1] == 2
    return source if is_split else None


def _polar(node: Any, user: fx.Node) -> tuple[Any, Any]:
    """Cosines and sines of a complex factor."""
    if not isinstance(node, fx.Node):
        raise Refused(f"the complex factor is {node}", user)
    if node.target is aten.polar.default:
        length, angle = node.args
        cos, sin = Call(aten.cos.default, (angle,)), Call(aten.sin.default, (angle,))
        if isinstance(length, fx.Node) and length.target is aten.ones_like.default:
            return cos, sin
        return Call(aten.mul.Tensor, (cos, length)), Call(aten.mul.Tensor, (sin, length))
    is_scaled = node.target is aten.mul.Tensor and isinstance(node.args[1], int | float)
    if node.target not in _VIEWS and not is_scaled:
        raise Refused(f"the complex factor comes from {op_name(node.target)} {node.name}, expected polar", node)
    parts = _polar(node.args[0], node)
    cos, sin = (Call(node.target, (part, *node.args[1:]), dict(node.kwargs)) for part in parts)
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


unfold_complex = rule_pass(
    "unfold_complex", _rules, Numerics.REORDER, unproved="complex numbers have no meaning over symbols"
)
