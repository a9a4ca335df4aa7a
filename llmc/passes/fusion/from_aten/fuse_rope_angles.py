"""Make the cosines and sines of rotary embedding with llmc.rope_angles, from the positions and one row of frequencies.

    cos(angles) · scale, sin(angles) · scale, with angles[t, i] = positions[t] · frequency[i]
        →  the halves of llmc.rope_angles(positions, inv_freq, scale), each put twice where the model has it twice
Must have: angles that depend only on positions and constants, and linearly on each position: the frequencies are read
off the values, however they are computed. Angles that change with the sequence length (dynamic NTK, longrope) are
refused: a cached key would have to be turned again.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal, Refused
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.evaluation import value_at
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, substitute
from llmc.passes.recorded_graph import constant_weight
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import shape_of, sizes_with_inferred

aten = torch.ops.aten

# Two lengths, so that a dependence on the length is seen; the second is past every model's original context.
_SHORT, _LONG = 8, 1 << 20


@dataclass(frozen=True)
class _Angles:
    """The angles of a rotation. frequencies: [rotary / 2], fp32. repeats: how the model puts each twice: not at all, as
    halves, or as pairs."""

    frequencies: Tensor
    repeats: str


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    positions = next(n for n in graph.inputs() if n.name == "positions")
    known: dict[fx.Node, _Angles] = {}
    half_angles: dict[tuple[bytes, float], tuple[fx.Node, fx.Node]] = {}
    for node in list(graph.graph.nodes):
        if node.target not in (aten.cos.default, aten.sin.default):
            continue
        source = node.args[0]
        try:
            angles = known[source] = known.get(source) or _read_angles(source, graph)
        except Refused as refused:
            log.refuse(Refusal(f"these are not rotary angles: {refused.refusal.reason}", node))
            continue
        root, scale = _scaled(node)
        key = (angles.frequencies.numpy().tobytes(), scale)
        if key not in half_angles:
            log.step(f"rotary angles of {len(angles.frequencies)} frequencies, scale {scale}", node)
            half_angles[key] = _make_angles(graph, positions, angles.frequencies, scale)
        log.step(f"{root.name} from the rotary angles", root)
        half = half_angles[key][0 if node.target is aten.cos.default else 1]
        substitute(graph.graph, root, _repeated(half, angles.repeats, root.meta["val"]))


def _read_angles(node: fx.Node, graph: ModelGraph) -> _Angles:
    symbolic = [i for i, s in enumerate(node.meta["val"].shape) if isinstance(s, SymInt)]
    if len(symbolic) != 1:
        raise Refused(f"they have {len(symbolic)} axes over tokens, expected 1", node)
    both = torch.arange(_SHORT), torch.arange(_LONG - 3, _LONG)
    tables = [
        value_at(node, graph, positions).movedim(symbolic[0], 0).reshape(len(positions), -1).float()
        for positions in both
    ]
    frequencies = tables[0][1]
    for positions, table in zip(both, tables, strict=True):
        if not torch.allclose(table, positions.float()[:, None] * frequencies, rtol=1e-5, atol=0):
            at = f"position {int(positions[-1])} has {table[-1].tolist()[:3]}…"
            raise Refused(f"they are not the position times a frequency, or change with the length: {at}", node)
    return _halved(frequencies)


def _halved(frequencies: Tensor) -> _Angles:
    half = len(frequencies) // 2
    if len(frequencies) == 2 * half and half:
        if torch.equal(frequencies[:half], frequencies[half:]):
            return _Angles(frequencies[:half].contiguous(), "halves")
        if torch.equal(frequencies[0::2], frequencies[1::2]):
            return _Angles(frequencies[0::2].contiguous(), "pairs")
    return _Angles(frequencies.contiguous(), "once")


def _scaled(node: fx.Node) -> tuple[fx.Node, float]:
    """The product with a constant (yarn's attention factor) that is all that becomes of a cosine or sine."""
    users = list(node.users)
    if len(users) == 1 and users[0].target is aten.mul.Tensor and isinstance(users[0].args[1], int | float):
        return users[0], float(users[0].args[1])
    return node, 1.0


def _make_angles(graph: ModelGraph, positions: fx.Node, frequencies: Tensor, scale: float) -> tuple[fx.Node, fx.Node]:
    weight = constant_weight(graph, "inv_freq", frequencies)
    last = graph.graph.find_nodes(op="placeholder")[-1]
    with graph.graph.inserting_after(last):
        value = positions.meta["val"]
        row = positions
        if value.dim() == 2:
            row = graph.graph.call_function(aten.squeeze.dim, (positions, 0))
    with graph.graph.inserting_after(last if row is positions else row):
        angles = graph.graph.call_function(torch.ops.llmc.rope_angles.default, (row, weight, scale))
    with graph.graph.inserting_after(angles):
        sin = graph.graph.call_function(operator.getitem, (angles, 1), name="sin")
        cos = graph.graph.call_function(operator.getitem, (angles, 0), name="cos")
    return cos, sin


def _repeated(half: fx.Node, repeats: str, like: Any) -> Call | fx.Node:
    value: Call | fx.Node = half
    if repeats == "halves":
        value = Call(aten.cat.default, ([half, half], 1))
    elif repeats == "pairs":
        pairs = Call(aten.stack.default, ([half, half], 2))
        value = Call(aten.reshape.default, (pairs, [-1, 2 * int(shape_of(half)[-1])]))
    if like.dim() != 2:
        value = Call(aten.reshape.default, (value, sizes_with_inferred(like.shape)))
    if like.dtype is not torch.float32:
        value = Call(aten._to_copy.default, (value,), {"dtype": like.dtype})
    return value


def _turned(x: Any, positions: Any) -> tuple[Any, Any]:
    counted = aten.unsqueeze.default(aten._to_copy.default(positions, dtype=torch.float32), 1)
    angles = aten.cat.default([counted, aten.mul.Tensor(counted, 0.25)], 1)
    sine = aten.mul.Tensor(aten.sin.default(angles), 0.5)
    return aten.mul.Tensor(x, aten.cos.default(angles)), aten.mul.Tensor(x, sine)


fuse_rope_angles = GraphPass(
    "fuse_rope_angles",
    _run,
    Numerics.REORDER,
    Stage.CAPTURED,
    examples=(Example(_turned, {"x": ("T", 2), "positions": torch.tensor([0, 1, 2])}),),
)
