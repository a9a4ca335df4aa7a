"""The cost of a node: bytes moved and floating-point operations, in the symbols of a step.

T: tokens. L: logit rows. R: requests. C: cached rows read, summed over requests. A: query-key pairs scored,
summed over requests; one query a request (a decode step) makes A = C. A sliding window caps both at `window` a
request or a query, which is exact when all contexts are on the same side of it.

Each operand is read once, each result written once, and views are free; llmc/prediction makes seconds of it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from llmc.formats.code_format import CODE_FORMATS
from llmc.graph.call_arguments import call_arguments
from llmc.graph.op_record import C, L, Part, R, T, op_call, record_of, visible_to
from llmc.graph.product_parts import part_of
from llmc.graph.step_inputs import symbol_names
from llmc.program import COMPACTION, STATE_SLOTS

_ZERO = sympy.Integer(0)
_BY_NAME = {"T": T, "L": L, "R": R}


@dataclass(frozen=True)
class Cost:
    """Sympy expressions. bytes_moved: for an embedding, only the rows looked up are read."""

    bytes_moved: sympy.Expr
    flops: sympy.Expr


def node_cost(node: fx.Node) -> Cost:
    """The cost of one node launched alone; zero for placeholders, views and the output."""
    return group_cost((node,))


def group_cost(nodes: Iterable[fx.Node]) -> Cost:
    """The cost of nodes that run as one loop: what passes between them stays in registers."""
    members = dict.fromkeys(nodes)
    working = [n for n in members if n.op == "call_function" and not _is_view(n)]
    read, written = _operands(working, members), _results(working, members)
    symbols = _symbols(working[0].graph) if working else {}
    total = sum((_moved(n, members, symbols) for n in (*read, *written)), _ZERO)
    extra = sum((_cache_bytes(n, symbols) for n in working), _ZERO)
    flops = sum((_flops(n, symbols) for n in working), _ZERO)
    return Cost(sympy.expand(total + extra), sympy.expand(flops))


_VIEWS = frozenset(
    {
        "aten.alias",
        "aten.chunk",
        "aten.detach",
        "aten.expand",
        "aten.permute",
        "aten.reshape",
        "aten.select",
        "aten.slice",
        "aten.split",
        "aten.split_with_sizes",
        "aten.squeeze",
        "aten.t",
        "aten.transpose",
        "aten.unsqueeze",
        "aten.view",
    }
)
_COPIES = frozenset({"aten.cat", "aten.clone"})
_CACHES = ("k_cache", "v_cache")
_RECENT_CACHES = ("recent_k", "recent_v")
_TABLES = ("block_tables", "recent_tables", "tree_masks")
_UNCOUNTED = frozenset({*_CACHES, *_RECENT_CACHES, *_TABLES, "state", "lora_a", "lora_b", "delta"})


def _operands(working: list[fx.Node], members: Mapping[fx.Node, None]) -> dict[fx.Node, None]:
    """Tensors read from outside, seen through views, without caches, states, block tables and masks, counted by row or
    tiny."""
    sources: dict[fx.Node, None] = {}
    for node in working:
        arguments = call_arguments(node)
        for name, argument in arguments.items() if COMPACTION not in arguments else ():
            if name not in _UNCOUNTED:
                sources |= dict.fromkeys(n for n in _nodes(argument) if _through_views(n, members) not in members)
    return sources


def _through_views(node: fx.Node, members: Mapping[fx.Node, None]) -> fx.Node:
    while node in members and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _results(working: list[fx.Node], members: Mapping[fx.Node, None]) -> list[fx.Node]:
    return [
        n for n in working if not n.users or (any(u not in members for u in n.users) and not _is_read_here(n, members))
    ]


def _is_read_here(node: fx.Node, members: Mapping[fx.Node, None]) -> bool:
    """Whether a member computes this weight from its stored form. Another kernel computes its own copy."""
    return part_of(node) is Part.STORAGE and any(u in members for u in node.users)


def _moved(node: fx.Node, members: Mapping[fx.Node, None], symbols: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    """Bytes that the members read of a tensor. Embedding tables and selections count the selected rows only; weights of
    experts count the experts that tokens are routed to."""
    readers = [u for u in node.users if u in members]
    total = _nbytes(node.meta["val"], symbols)
    shares = _shares(node, members, symbols)
    if shares:
        total = sum((total * share for share in shares), _ZERO)
    bits = [_code_bits(u, node) for u in readers]
    return total * min(bits) / 8 if bits else total


def _shares(
    tensor: fx.Node, members: Mapping[fx.Node, None], symbols: Mapping[sympy.Symbol, sympy.Symbol]
) -> list[sympy.Expr]:
    """The fraction that each member reads of a tensor, or of a weight stored in it. Members that read all are left
    out."""
    shares: list[sympy.Expr] = []
    for user in (u for u in tensor.users if u in members):
        record = record_of(user)
        if record is None:
            continue
        arguments = call_arguments(user)
        if record.table is not None and arguments[record.table] is tensor:
            shares.append(_numel(user.meta["val"].shape, symbols) / _numel(tensor.meta["val"].shape, symbols))
        elif record.share is not None and arguments["weight"] is tensor:
            shares.append(record.share(op_call(user, symbols)))
        elif record.part is Part.STORAGE and any(arguments[name] is tensor for name in record.rows):
            shares += _shares(user, members, symbols)
    return shares


def _code_bits(user: fx.Node, codes: fx.Node) -> int:
    """Return the stored bits per byte of the graph's tensor: kernels pack codes more tightly than one per byte."""
    arguments = call_arguments(user)
    is_codes = arguments.get("codes") is codes and arguments.get("format") in CODE_FORMATS
    return CODE_FORMATS[arguments["format"]].bits if is_codes else 8


def _cache_bytes(node: fx.Node, symbols: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    """Bytes that a node reads from or writes to the KV cache or to the states of its requests."""
    arguments = call_arguments(node)
    if STATE_SLOTS in arguments:
        state = arguments["state"].meta["val"]
        return 2 * R * math.prod(state.shape[1:]) * state.dtype.itemsize
    if COMPACTION in arguments or not any(name in arguments for name in _CACHES):
        return _ZERO  # Steps with a compaction are not counted.
    row = _row_bytes(arguments, *_CACHES)
    if "slot_mapping" in arguments:
        return row * _dimension(arguments["slot_mapping"].meta["val"].shape[0], symbols)
    seen = visible_to(arguments).most
    visible = C if seen is None else sympy.Min(C, seen * R)
    if arguments.get("recent") is None:
        return row * visible
    exact = sympy.Min(visible, arguments["recent"] * R)
    return row * (visible - exact) + _row_bytes(arguments, *_RECENT_CACHES) * exact


def _row_bytes(arguments: Mapping[str, Any], *caches: str) -> int:
    """Bytes of a position in these caches, in all heads."""
    return sum(c.shape[1] * c.shape[3] * c.dtype.itemsize for c in (arguments[name].meta["val"] for name in caches))


def _flops(node: fx.Node, symbols: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    """Return the operations by the op's record. Ops of aten count one per element, because a pointwise op is never the
    limit."""
    call, record = op_call(node, symbols), record_of(node)
    if record is not None:
        return record.flops(call)
    return _ZERO if _name(node) in _COPIES else call.elements()


def _nodes(argument: Any) -> tuple[fx.Node, ...]:
    nodes: list[fx.Node] = []
    fx.map_arg(argument, nodes.append)
    return tuple(nodes)


def _name(node: fx.Node) -> str:
    """namespace.op, as `llmc.linear`."""
    return str(getattr(node.target, "overloadpacket", node.target))


def _is_view(node: fx.Node) -> bool:
    return node.target is getitem or _name(node) in _VIEWS


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    return tuple(t for v in value for t in _tensors(v)) if isinstance(value, tuple | list) else ()


def _nbytes(value: Any, symbols: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    return sum((_numel(t.shape, symbols) * t.dtype.itemsize for t in _tensors(value)), _ZERO)


def _numel(shape: Iterable[int | torch.SymInt], symbols: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    return math.prod((_dimension(s, symbols) for s in shape), start=sympy.Integer(1))


def _dimension(size: int | torch.SymInt, symbols: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr.xreplace(symbols)


def _symbols(graph: fx.Graph) -> dict[sympy.Symbol, sympy.Symbol]:
    """Map the symbols of the fake tensors to the symbols of a step."""
    return {own: _BY_NAME[name] for own, name in symbol_names(graph).items() if name in _BY_NAME}
