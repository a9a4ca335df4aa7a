"""The ops on an attention's scores between the product and the softmax, recognised by their values.

    score = factor · (q·k) + added, perhaps with cap · tanh(…) in between
It may be scaled, masked, filled, clamped and biased, in any order and as often as a model likes: all but the product is
known when the engine is built, so that the whole chain is carried out for lines, a factor and a summand of each query
and key, one head after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refused
from llmc.graph.render import op_name
from llmc.passes.fusion.from_aten.causal_mask import (
    HIDDEN,
    CausalMask,
    head_count,
    head_of,
    lengths_to_look_at,
    mask_of_heads,
    mask_value,
)

aten = torch.ops.aten

# In fp64, so that a scale is the number that the model has.
_ONE = torch.ones((), dtype=torch.float64)


@dataclass(frozen=True)
class Scores:
    """The scores of an attention in single ops. product: the matmul at the start. scale, softcap and mask as
    llmc.attention takes them."""

    product: fx.Node
    scale: float
    softcap: float | None
    mask: CausalMask


@dataclass(frozen=True)
class _Line:
    """factor · score + added, each broadcast to [tokens, tokens]. inside: the factor within a tanh, if one was met."""

    factor: Tensor
    added: Tensor
    inside: float | None = None


def read_scores(softmax: fx.Node, graph: ModelGraph) -> Scores:
    """Analyse the input of a softmax. Raises Refused with the op, or the query and key, that attention cannot
    express."""
    start: Any = softmax.args[0]
    product, chain = _chain(start, softmax)
    in_chain = {product, *chain}
    known = list(dict.fromkeys(n for link in chain for n in link.all_input_nodes if n not in in_chain))
    if not known:
        raise Refused("the attention is not causal: its scores are not masked", softmax)
    scores: Scores | None = None
    for length in lengths_to_look_at(known, graph):
        values = {node: mask_value(node, graph, length) for node in known}
        heads = max((head_count(value) for value in values.values()), default=1)
        lines = (_line_of_head(start, product, chain, values, head) for head in range(heads))
        scores = _scores(product, lines, length, softmax)
    assert scores is not None
    return scores


def _chain(start: fx.Node, softmax: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The product of queries and keys, and the nodes from there to `start` that depend on it, in order."""
    seen: set[fx.Node] = set()
    products: set[fx.Node] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is aten.matmul.default:
            products.add(node)
        else:
            stack.extend(node.all_input_nodes)
    if len(products) != 1:
        raise Refused(f"the softmax is of {len(products)} products, expected one of queries and keys", softmax)
    (product,) = products
    reached = {product}
    chain: list[fx.Node] = []
    for node in product.graph.nodes:
        if node in seen and node not in reached and not reached.isdisjoint(node.all_input_nodes):
            if node.target not in _OPS:
                raise Refused(f"the scores go through {op_name(node.target)} {node.name}", node)
            reached.add(node)
            chain.append(node)
    return product, chain


def _line_of_head(
    start: fx.Node, product: fx.Node, chain: list[fx.Node], known: dict[fx.Node, Tensor], head: int
) -> _Line:
    values: dict[fx.Node, Any] = {node: head_of(value, head) for node, value in known.items()}
    values[product] = _Line(_ONE, torch.zeros(()))
    for node in chain:
        operands = [values[a] if isinstance(a, fx.Node) else a for a in call_arguments(node).values()]
        values[node] = _OPS[node.target](node, *operands)
    line: _Line = values[start]
    return line


def _scores(product: fx.Node, lines: Iterator[_Line], length: int, softmax: fx.Node) -> Scores:
    added: list[Tensor] = []
    factors: set[tuple[float, float | None]] = set()
    for line in lines:
        value = line.added.float().expand(length, length)
        lost = value[(line.factor == 0) & (value > HIDDEN)]
        if len(lost):
            raise Refused(f"masked scores become {float(lost.max())}, expected {HIDDEN} or less", softmax)
        factors |= {(factor, line.inside) for factor in _least_and_most(line.factor, value > HIDDEN)}
        added.append(value)
    if len(factors) != 1:
        raise Refused(f"visible scores are multiplied by {sorted(factors)}, expected one number for all", softmax)
    ((factor, inside),) = factors
    mask = mask_of_heads(added, length, softmax)
    return Scores(product, factor if inside is None else inside * factor, None if inside is None else factor, mask)


def _least_and_most(factor: Tensor, shown: Tensor) -> set[float]:
    """Return the least and the largest value of a factor where scores are shown; a single number if it is constant."""
    if factor.numel() == 1 or not shown.any():
        return {float(factor.flatten()[0])}
    numbers = factor.expand(shown.shape)[shown]
    return {float(numbers.min()), float(numbers.max())}


def _mul(node: fx.Node, a: Any, b: Any) -> _Line:
    line, other = (a, b) if isinstance(a, _Line) else (b, a)
    if isinstance(other, _Line):
        raise Refused("the scores are multiplied with themselves", node)
    return _Line(line.factor * other, line.added * other, line.inside)


def _div(node: fx.Node, a: Any, b: Any) -> _Line:
    if isinstance(b, _Line):
        raise Refused("a number is divided by the scores", node)
    return _Line(a.factor / b, a.added / b, a.inside)


def _add(node: fx.Node, a: Any, b: Any, alpha: float) -> _Line:
    if alpha != 1 or (isinstance(a, _Line) and isinstance(b, _Line)):
        raise Refused("the scores are added to themselves, or more than once", node)
    line, other = (a, b) if isinstance(a, _Line) else (b, a)
    return _Line(line.factor, line.added + other, line.inside)


def _sub(node: fx.Node, a: Any, b: Any, alpha: float) -> _Line:
    if isinstance(b, _Line):
        raise Refused("the scores are subtracted", node)
    return _add(node, a, -b, alpha)


def _where(node: fx.Node, condition: Any, a: Any, b: Any) -> _Line:
    if isinstance(condition, _Line):
        raise Refused("which scores are visible depends on the scores", node)
    sides = [s if isinstance(s, _Line) else _Line(0 * _ONE, torch.as_tensor(s).float()) for s in (a, b)]
    inside = {line.inside for operand, line in zip((a, b), sides, strict=True) if isinstance(operand, _Line)}
    if len(inside) != 1:
        raise Refused("only a part of the scores is capped", node)
    (inner,) = inside
    first, second = sides
    factor = torch.where(condition, first.factor, second.factor)
    return _Line(factor, torch.where(condition, first.added, second.added), inner)


def _maximum(node: fx.Node, a: Any, b: Any) -> _Line:
    """A clamp from below at what is hidden anyway."""
    line, other = (a, b) if isinstance(a, _Line) else (b, a)
    if isinstance(other, _Line) or bool((torch.as_tensor(other) > HIDDEN).any()):
        raise Refused(f"the scores are clamped, expected at {HIDDEN} or less", node)
    return _Line(line.factor, torch.maximum(line.added, torch.as_tensor(other)), line.inside)


def _tanh(node: fx.Node, line: _Line) -> _Line:
    scales = line.factor.unique().tolist()
    if line.inside is not None or len(scales) != 1 or bool((line.added != 0).any()):
        raise Refused("the scores are capped after they were masked", node)
    return _Line(_ONE, torch.zeros(()), float(scales[0]))


def _cast(node: fx.Node, line: _Line, *options: Any) -> _Line:
    return line


_OPS: dict[Any, Callable[..., _Line]] = {
    aten._to_copy.default: _cast,
    aten.add.Tensor: _add,
    aten.div.Tensor: _div,
    aten.maximum.default: _maximum,
    aten.mul.Tensor: _mul,
    aten.sub.Tensor: _sub,
    aten.tanh.default: _tanh,
    aten.where.self: _where,
}
