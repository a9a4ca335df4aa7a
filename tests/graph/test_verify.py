"""What is legal at each stage, and the message where something is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.graph.verify import verify
from llmc.options import BuildOptions
from llmc.passes.pipeline import fusion, serving
from llmc.passes.runner import run_pipeline
from tests.family_captures import FamilyCaptures
from tests.graph_builder import GraphBuilder, llama

aten = torch.ops.aten
ops = torch.ops.llmc


def _graph(stage: Stage) -> ModelGraph:
    graph, _ = llama(layers=1)
    if stage is Stage.SERVING:
        return run_pipeline(graph, serving(), BuildOptions()).graph
    if stage is Stage.OPTIMIZED:
        return run_pipeline(graph, (*serving(), *fusion()), BuildOptions()).graph
    return graph


@pytest.mark.parametrize("stage", [Stage.CANONICAL, Stage.SERVING, Stage.OPTIMIZED])
def test_each_stage_is_legal_as_itself_and_not_as_another(stage: Stage) -> None:
    graph = _graph(stage)
    verify(graph)
    for other in (Stage.CANONICAL, Stage.SERVING):
        graph.stage = other
        if other is not stage and not (stage is Stage.SERVING and other is Stage.OPTIMIZED):
            with pytest.raises(PassError):
                verify(graph)
    graph.stage = Stage.LOWERED
    with pytest.raises(PassError, match="a lowered program is not a graph"):
        verify(graph)


def test_between_two_stages_the_ops_of_both_are_legal() -> None:
    graph = _graph(Stage.OPTIMIZED)
    graph.stage = Stage.SERVING
    with pytest.raises(PassError, match=r"is not legal at stage serving"):
        verify(graph)
    verify(graph, also=(Stage.OPTIMIZED,))


def _built(body: Callable[[GraphBuilder, fx.Node], Any]) -> ModelGraph:
    builder = GraphBuilder()
    graph, _ = builder.finish(body(builder, builder.embedded()))
    return graph


def test_the_message_names_the_op_the_stage_and_the_source_line() -> None:
    graph = _built(lambda b, x: b.call(aten.softmax.int, x, -1))
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.softmax.int)
    node.meta["stack_trace"] = 'File "model.py", line 3, in forward'
    with pytest.raises(PassError, match=r"softmax_int: aten\.softmax\.int is not legal at stage canonical") as error:
        verify(graph)
    assert error.value.at == "model.py:3 in forward"


def test_ops_that_write_are_never_captured() -> None:
    graph = _built(lambda b, x: b.call(aten.add_.Tensor, b.call(aten.exp.default, x), 1.0))
    graph.stage = Stage.CAPTURED
    with pytest.raises(PassError, match=r"aten\.add_\.Tensor is not legal at stage captured"):
        verify(graph)


def test_a_fallback_makes_its_ops_legal() -> None:
    graph = _built(lambda b, x: b.call(aten.linear.default, x, b.weight("w", 8, 8)))
    with pytest.raises(PassError, match=r"aten\.linear\.default is not legal"):
        verify(graph)
    verify(graph, allow_fallback=("linear",))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (lambda b, x: b.call(ops.rms_norm.default, x, b.weight("w", 4), 1e-6), r"weight \[4\] does not fit x"),
        (lambda b, x: _without_value(b.call(aten.exp.default, x)), "it has no fake value"),
        (
            lambda b, x: _attention(b, x, heads=3, kv_heads=2),
            r"the heads do not fit: q \[\w+, 3, 2\], k \[\w+, 2, 2\]",
        ),
        (lambda b, x: _rope(b, x, half=3), "6 channels turn but a head has 4"),
    ],
)
def test_shapes_are_checked(body: Callable[[GraphBuilder, fx.Node], Any], problem: str) -> None:
    with pytest.raises(PassError, match=problem):
        verify(_built(body))


def test_logits_must_be_fp32_over_the_vocabulary() -> None:
    builder = GraphBuilder()
    x = builder.embedded()
    graph, _ = builder.finish_with(builder.call(aten.exp.default, x))
    with pytest.raises(PassError, match="not logits over 17 tokens"):
        verify(graph)


def test_the_inputs_must_be_the_stages() -> None:
    graph, _ = llama(layers=1)
    graph.stage = Stage.SERVING
    with pytest.raises(PassError, match=r"the step inputs are \['input_ids', 'positions'\], expected \['input_ids'"):
        verify(graph)


def test_a_weight_needs_its_placeholder() -> None:
    graph, _ = llama(layers=1)
    graph.weights["lost"] = next(iter(graph.weights.values()))
    with pytest.raises(PassError, match=r"weights that have no placeholder: \['lost'\]"):
        verify(graph)


def _without_value(node: fx.Node) -> fx.Node:
    clone = node.graph.call_function(aten.neg.default, (node,))
    clone.meta["val"] = node.meta["val"]
    after = node.graph.call_function(aten.exp.default, (clone,))
    after.meta["val"] = node.meta["val"]
    del clone.meta["val"]
    return after


def _attention(b: GraphBuilder, x: fx.Node, *, heads: int, kv_heads: int) -> fx.Node:
    split = b.call(aten.reshape.default, x, [-1, 4, 2])
    q, k = (b.call(aten.slice.Tensor, split, 1, 0, n) for n in (heads, kv_heads))
    y = b.call(aten.reshape.default, b.call(ops.attention.default, q, k, k, 1.0), [-1, heads * 2])
    rest = b.call(aten.slice.Tensor, x, 1, heads * 2, 8)
    return b.call(aten.cat.default, [y, rest], 1)


def _rope(b: GraphBuilder, x: fx.Node, *, half: int) -> fx.Node:
    cos, sin = b.angles(half)
    heads = b.call(aten.reshape.default, x, [-1, 2, 4])
    node = b.graph.call_function(ops.rope.default, (heads, cos, sin, False))
    node.meta["val"] = heads.meta["val"]
    return b.call(aten.reshape.default, node, [-1, 8])


def test_what_a_captured_graph_returns_beside_its_logits_may_have_the_batch(captured_family: FamilyCaptures) -> None:
    """One more axis before the tokens' than at later stages, whose sizes behind that of the tokens are numbers."""
    graph = captured_family("llama").captured.graph.copy()
    graph.add_side_output("states", _first_of_rank(graph, 3))
    verify(graph)
    graph.add_side_output("heads", _first_of_rank(graph, 4))
    with pytest.raises(PassError, match=r"the side output heads is .*, expected a row per token or logit row"):
        verify(graph)


def _first_of_rank(graph: ModelGraph, rank: int) -> fx.Node:
    """The first result of so many axes, one of which is the tokens'."""
    nodes: list[fx.Node] = [node for node in graph.graph.nodes if node.op == "call_function"]
    shapes = {node: node.meta["val"].shape for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)}
    return next(n for n, shape in shapes.items() if len(shape) == rank and not all(isinstance(s, int) for s in shape))
