"""Reorder the rows of a product's weight so that what heads take from it by turns lies in one piece each.

    y = reshape(linear(x, w, b), [-1, H, 3 D]);  y[:, :, :D], y[:, :, D:2 D], y[:, :, 2 D:]      (GPT-NeoX)
    y = reshape(linear(x, w, b), [-1, H, 3, D]);  y[:, :, 0], y[:, :, 1], y[:, :, 2]             (BLOOM)
        ->  z = linear(x, w[order], b[order]);  reshape(z[:, :H D], [-1, H, D]), reshape(z[:, H D:2 H D], …), …
Kernels read rows with a gap after each, but none within: before, each head's part of q, k and v was copied out.
Must have: the parts are all that reads the product, do not overlap, and together are all of it; w and b are weights,
or codes of one, that nothing else reads. With one head the parts lie in one piece already.
Numerics: reorder, since a library matrix product may use another order of sums for a row at another place; the kernels
here do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import Part
from llmc.graph.product_parts import part_of, stored_rows
from llmc.graph.refusal import Refused
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant, Derived
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.uses import used_only_by

aten = torch.ops.aten
_LINEAR = torch.ops.llmc.linear.default


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Try every product that is split into heads, in order."""
    for linear in graph.graph.find_nodes(op="call_function", target=_LINEAR):
        heads = next(iter(linear.users)) if len(linear.users) == 1 else None
        if heads is None or heads.target is not aten.reshape.default or heads.meta["val"].dim() not in (3, 4):
            continue
        parts = _parts(heads)
        if len(parts) < 2 or heads.meta["val"].shape[1] == 1:
            continue
        with log.refusing():
            _check(graph, linear, heads, parts)
            log.step(" + ".join(part.node.name for part in parts), linear, heads, *(part.node for part in parts))
            _separate(graph, linear, heads, parts)


def _heads_in_turn(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    heads = aten.reshape.default(_LINEAR(x, weight, bias), [-1, 2, 5])
    return tuple(aten.slice.Tensor(heads, 2, start, end) for start, end in ((0, 2), (2, 4), (4, 5)))


def _heads_of_one_size(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    heads = aten.reshape.default(_LINEAR(x, weight, bias), [-1, 2, 5, 1])
    return tuple(aten.select.int(heads, 2, i) for i in range(5))


separate_qkv = GraphPass(
    "separate_qkv",
    run,
    Numerics.REORDER,
    Stage.OPTIMIZED,
    examples=tuple(
        Example(body, {"x": ("T", 3), "weight": (10, 3), "bias": (10,)}, frozenset({"weight", "bias"}))
        for body in (_heads_in_turn, _heads_of_one_size)
    ),
)


@dataclass(frozen=True)
class _Part:
    """The channels start to end of each head that a node takes."""

    node: fx.Node
    start: int
    end: int


def _parts(heads: fx.Node) -> list[_Part]:
    """The parts that are read, in order of their channels; none if something reads all of a head, or of its tokens."""
    shape = heads.meta["val"].shape
    parts: list[_Part] = []
    for user in heads.users:
        arguments = call_arguments(user)
        if user.target is aten.slice.Tensor and len(shape) == 3 and arguments["dim"] in (2, -1):
            start, end = arguments["start"] or 0, arguments["end"]
            end = shape[2] if end is None else min(end, shape[2])
            if arguments["step"] != 1 or start < 0 or end < 0:
                return []
            parts.append(_Part(user, start, end))
        elif user.target is aten.select.int and len(shape) == 4 and arguments["dim"] in (2, -2):
            start = arguments["index"] % shape[2] * shape[3]
            parts.append(_Part(user, start, start + shape[3]))
        else:
            return []
    return sorted(parts, key=lambda part: part.start)


def _check(graph: ModelGraph, linear: fx.Node, heads: fx.Node, parts: Sequence[_Part]) -> None:
    width = linear.meta["val"].shape[-1] // heads.meta["val"].shape[1]
    ends = [0, *(part.end for part in parts)]
    if [*(part.start for part in parts), width] != ends:
        ranges = ", ".join(f"{part.start} to {part.end}" for part in parts)
        raise Refused(f"channels {ranges} of a head's {width} are read, expected each of them once", heads)
    arguments = call_arguments(linear)
    for tensor in (arguments["weight"], arguments["bias"]):
        for weight, reader in () if tensor is None else _stored(tensor, linear):
            if weight.name not in graph.weights:
                raise Refused(f"{weight.name} is computed in the step, not a weight", linear)
            if weight.meta["val"].shape[0] != linear.meta["val"].shape[-1]:
                raise Refused(f"{weight.name} has {weight.meta['val'].shape[0]} rows, not one for each channel", linear)
            used_only_by(weight, (reader,), at=linear)


def _stored(tensor: fx.Node, reader: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The tensors with one row per row of a weight, and their readers: the weight itself, or its stored tensors."""
    if part_of(tensor) is not Part.STORAGE:
        return [(tensor, reader)]
    return [(part, tensor) for part in stored_rows(tensor).values()]


def _separate(graph: ModelGraph, linear: fx.Node, heads: fx.Node, parts: Sequence[_Part]) -> None:
    rows, count = linear.meta["val"].shape[-1], heads.meta["val"].shape[1]
    channels = torch.arange(rows).reshape(count, rows // count)
    order = Constant(torch.cat([channels[:, part.start : part.end].reshape(-1) for part in parts]))
    arguments = call_arguments(linear)
    for tensor in (arguments["weight"], arguments["bias"]):
        for weight, _ in () if tensor is None else _stored(tensor, linear):
            graph.weights[weight.name] = Derived(aten.index_select.default, (graph.weights[weight.name], 0, order))
    with graph.graph.inserting_before(heads):
        for part in parts:
            width = part.end - part.start
            piece = graph.graph.call_function(aten.slice.Tensor, (linear, 1, count * part.start, count * part.end))
            alone = graph.graph.call_function(aten.reshape.default, (piece, [-1, count, width]))
            part.node.replace_all_uses_with(alone)
    for part in parts:
        graph.graph.erase_node(part.node)
    graph.graph.erase_node(heads)
