"""Add the residual stream where the product before it is still in registers.

    add(linear(x, w, b), r)            ->  fused_linear(x, w, b, r, "identity", 1.0)
    add(mul(linear(x, w, b), s), r)    ->  fused_linear(x, w, b, r, "identity", s)           (Granite)
    add(add(linear₁, linear₂), r)      ->  fused_linear₂ with residual fused_linear₁ with r  (parallel blocks)
also with fused_linear that has no residual yet in the place of linear.
Must have: the product and its multiple are used by the sum only; r has the sum's shape and dtype.
Runs before fuse_add_norm and takes every sum it can: the product's epilogue reads r and writes the sum (2 tensors),
the norm after it reads and writes one each: 4 in all. add_rms_norm in its place would make it 5, since the product
writes what add_rms_norm reads back. A sum of two things that are no products is left to add_rms_norm.
Numerics: reorder, since the product is not rounded before the sum, and the third form sums in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.render import render_type
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

_ADD = torch.ops.aten.add.Tensor
_MUL = torch.ops.aten.mul.Tensor
_LINEAR = torch.ops.llmc.linear.default
_FUSED = torch.ops.llmc.fused_linear.default


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Try every sum, the last first, so that a sum of two products and a residual is seen whole."""
    for node in reversed(graph.graph.find_nodes(op="call_function", target=_ADD)):
        candidates = _candidates(node) if node.users else ()
        found = next((c for c in candidates if isinstance(c, _Sum)), None) or next(iter(candidates), None)
        if isinstance(found, _Sum):
            log.step(" + ".join(n.name for n in found.nodes), node, *found.nodes)
            _fuse(graph, node, found)
        elif found is not None:
            log.refuse(found)


fuse_linear_residual = GraphPass("fuse_linear_residual", run, Numerics.REORDER, Stage.OPTIMIZED)


@dataclass(frozen=True)
class _Product:
    """A linear or fused_linear without residual, times a number. top: the node that the sum reads."""

    top: fx.Node
    linear: fx.Node
    scale: float


@dataclass(frozen=True)
class _Sum:
    """products to add to the residual, innermost first. nodes: what is replaced."""

    products: tuple[_Product, ...]
    residual: fx.Node
    nodes: tuple[fx.Node, ...]


def _candidates(node: fx.Node) -> tuple[_Sum | Refusal, ...]:
    """Each way to fuse a sum, the best first, or what is against it."""
    operands = _operands(node)
    if operands is None:
        return ()
    products = [_product(n) for n in operands]
    if None not in products and _is_summed_again(node):
        return ()
    found: list[_Sum | Refusal] = []
    for product, residual in ((products[1], operands[0]), (products[0], operands[1])):
        if product is not None:
            whole = _Sum((product,), residual, (product.linear, node))
            found.append(_refusal(product, residual, node) or whole)
    for inner, residual in (operands, operands[::-1]):
        pair = _pair(inner)
        if pair is not None:
            refusal = next((r for p in pair if (r := _refusal(p, residual, inner))), None)
            whole = _Sum(pair, residual, (*(p.linear for p in pair), inner, node))
            found.append(refusal or _used_elsewhere(inner, node) or whole)
    return tuple(found)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two different tensors that a sum adds."""
    arguments = call_arguments(node)
    first, second = arguments["self"], arguments["other"]
    if arguments["alpha"] != 1 or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    return None if first is second else (first, second)


def _pair(inner: fx.Node) -> tuple[_Product, _Product] | None:
    """Two products that are summed before anything else."""
    operands = _operands(inner) if inner.target is _ADD else None
    if operands is None:
        return None
    first, second = (_product(n) for n in operands)
    return None if first is None or second is None else (first, second)


def _is_summed_again(node: fx.Node) -> bool:
    """Whether the sum that reads this one can take both of its products."""
    return len(node.users) == 1 and next(iter(node.users)).target is _ADD


def _product(node: fx.Node) -> _Product | None:
    top, scale = node, 1.0
    if node.target is _MUL:
        factors = [call_arguments(node)[n] for n in ("self", "other")]
        numbers = [f for f in factors if isinstance(f, int | float)]
        tensors = [f for f in factors if isinstance(f, fx.Node)]
        if len(numbers) != 1:
            return None
        node, scale = tensors[0], float(numbers[0])
    if node.target is _LINEAR:
        return _Product(top, node, scale)
    if node.target is _FUSED and call_arguments(node)["residual"] is None:
        return _Product(top, node, scale * call_arguments(node)["scale"])
    return None


def _refusal(product: _Product, residual: fx.Node, total: fx.Node) -> Refusal | None:
    wanted, seen = render_type(product.linear), render_type(residual)
    if seen != wanted:
        return Refusal(f"the product is {wanted}, what it is added to {seen}", total)
    return _used_elsewhere(product.top, total) or _used_elsewhere(product.linear, product.top, total)


def _used_elsewhere(node: fx.Node, *users: fx.Node) -> Refusal | None:
    others = [u.name for u in node.users if u not in users]
    return Refusal(f"{node.name} is also used by {', '.join(others)}", node) if others else None


def _fuse(graph: ModelGraph, node: fx.Node, found: _Sum) -> None:
    total = found.residual
    with graph.graph.inserting_before(node):
        for product in found.products:
            arguments = call_arguments(product.linear)
            activation = arguments.get("activation", "identity")
            total = graph.graph.call_function(
                _FUSED, (arguments["x"], arguments["weight"], arguments["bias"], total, activation, product.scale)
            )
    node.replace_all_uses_with(total)
    # Erased here, since a product that is gone must not count as a user of the next sum's operands.
    tops = (p.top for p in found.products)
    for dead in sorted({*found.nodes, *tops}, reverse=True):
        graph.graph.erase_node(dead)
