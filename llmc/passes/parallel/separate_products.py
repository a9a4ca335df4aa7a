"""Make one product of each piece that is cut out of another's channels, so that each can be cut into ranks by itself.

    y = linear(x, w, b);  y[:, a:e], …                       ->  linear(x, w[a:e], b[a:e]), …       (GPT-2, Phi-3)
    y = reshape(linear(x, w, b), [-1, n, D]);  y[:, a:e], …  ->  reshape(linear(x, w[a D:e D], …), [-1, e - a, D]), …
Only for several ranks: cut as a whole, each rank would get rows of the query's weight, or of the key's. merge_qkv joins
what each rank has again.
Must have: slices are all that reads the product; w and b are weights, or codes of one.
Numerics: reorder, since a library matrix product may use another order of sums for a row at another place; the kernels
here do not.
"""

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import Part
from llmc.graph.product_parts import part_of, stored_rows
from llmc.graph.refusal import Refused
from llmc.graph.weights import Derived
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

aten = torch.ops.aten
_LINEAR = torch.ops.llmc.linear.default


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Try every product, in order."""
    if options.tensor_parallel_size > 1:
        separate(graph, log)


def separate(graph: ModelGraph, log: RewriteLog) -> tuple[tuple[fx.Node, ...], ...]:
    """Take every product apart that only slices read. Returns the products that each became."""
    products: list[tuple[fx.Node, ...]] = []
    for linear in graph.graph.find_nodes(op="call_function", target=_LINEAR):
        reader = linear
        if len(linear.users) == 1 and (only := next(iter(linear.users))).target is aten.reshape.default:
            reader = only if only.meta["val"].dim() == 3 else linear
        pieces = _pieces(reader)
        if len(pieces) < 2:
            continue
        with log.refusing():
            _check(graph, linear)
            log.step(" + ".join(piece.node.name for piece in pieces), linear, *(piece.node for piece in pieces))
            products.append(tuple(_separate(graph, linear, reader, piece) for piece in pieces))
    return tuple(products)


def _cut(x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    channels = _LINEAR(x, weight, bias)
    return aten.slice.Tensor(channels, 1, 0, 1), aten.slice.Tensor(channels, 1, 1, 4)


_TENSORS = {"x": ("T", 2), "weight": (4, 2), "bias": (4,)}
separate_products = GraphPass(
    "separate_products",
    run,
    Numerics.REORDER,
    examples=(Example(_cut, _TENSORS, frozenset({"weight", "bias"}), options=BuildOptions(tensor_parallel_size=2)),),
)


@dataclass(frozen=True)
class _Piece:
    """The part of an axis that a node takes: start to end."""

    node: fx.Node
    start: int
    end: int


def _pieces(reader: fx.Node) -> list[_Piece]:
    """The slices of axis 1 that are all that reads a node; none if others do."""
    pieces: list[_Piece] = []
    for user in reader.users:
        arguments = call_arguments(user)
        size = reader.meta["val"].shape[1]
        if user.target is aten.slice.Tensor and _is_second(arguments["dim"], reader) and arguments["step"] == 1:
            start, end, _ = slice(arguments["start"], arguments["end"]).indices(size)
            pieces.append(_Piece(user, start, end))
        elif user.target is aten.split_with_sizes.default and _is_second(arguments["dim"], reader):
            starts = [sum(arguments["split_sizes"][:i]) for i in range(len(arguments["split_sizes"]) + 1)]
            for piece in user.users:
                index: Any = piece.args[1] if piece.target is getitem else None
                if index is None:
                    return []
                pieces.append(_Piece(piece, starts[index], starts[index + 1]))
        else:
            return []
    return pieces


def _is_second(dim: int, reader: fx.Node) -> bool:
    return dim % int(reader.meta["val"].dim()) == 1


def _check(graph: ModelGraph, linear: fx.Node) -> None:
    arguments = call_arguments(linear)
    for tensor in (arguments["weight"], arguments["bias"]):
        for weight in [] if tensor is None else _rows(tensor).values():
            if weight.name not in graph.weights:
                raise Refused(f"{weight.name} is computed in the step, not a weight", linear)


def _rows(tensor: fx.Node) -> dict[str, fx.Node]:
    """The tensors with one row per row of a weight: the weight itself, or its stored tensors."""
    return stored_rows(tensor) if part_of(tensor) is Part.STORAGE else {"": tensor}


def _separate(graph: ModelGraph, linear: fx.Node, reader: fx.Node, piece: _Piece) -> fx.Node:
    width = 1 if reader is linear else int(reader.meta["val"].shape[2])
    start, end = piece.start * width, piece.end * width
    arguments = call_arguments(linear)
    with graph.graph.inserting_before(linear):
        weight, bias = (
            None if tensor is None else _sliced(graph, tensor, start, end)
            for tensor in (arguments["weight"], arguments["bias"])
        )
        product = graph.graph.call_function(_LINEAR, (arguments["x"], weight, bias, arguments["dtype"]))
        alone = product
        if reader is not linear:
            shape = [-1, piece.end - piece.start, width]
            alone = graph.graph.call_function(aten.reshape.default, (alone, shape))
    piece.node.replace_all_uses_with(alone)
    return product


def _sliced(graph: ModelGraph, tensor: fx.Node, start: int, end: int) -> fx.Node:
    """Return rows of a weight, stored as it is."""
    if part_of(tensor) is not Part.STORAGE:
        return _slice(graph, tensor, start, end)
    rows = {name: _slice(graph, node, start, end) for name, node in stored_rows(tensor).items()}
    arguments = call_arguments(tensor) | rows
    return graph.graph.create_node("call_function", tensor.target, tuple(arguments.values()))


def _slice(graph: ModelGraph, weight: fx.Node, start: int, end: int) -> fx.Node:
    value: Tensor = weight.meta["val"]
    with graph.graph.inserting_after(weight):
        part = graph.graph.placeholder(f"{weight.name}_{start}")
    part.meta["val"] = value.new_empty((end - start, *value.shape[1:]))
    graph.weights[part.name] = Derived(aten.slice.Tensor, (graph.weights[weight.name], 0, start, end))
    return part
