"""What render writes, read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.errors import EngineFormatError
from llmc.graph.graph_text import read_graph_text, read_node
from llmc.graph.render import op_name, render, render_type
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from tests.family_captures import FamilyCaptures


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_every_node_comes_back(family: str, captured_family: FamilyCaptures) -> None:
    captured = captured_family(family).captured.graph
    for graph in (captured, run_pipeline(captured, default(), BuildOptions()).graph):
        text = read_graph_text(render(graph), Path("graph.txt"))
        nodes = [node for node in graph.graph.nodes if node.op != "output"]
        assert text.stage == graph.stage.value
        assert [n.name for n in text.nodes] == [n.name for n in nodes]
        for ours, node in zip(text.nodes, nodes, strict=True):
            assert ours.type == render_type(node)
            assert ours.op == (op_name(node.target) if node.op == "call_function" else None)
            assert set(ours.inputs) == {n.name for n in node.all_input_nodes}
        (output,) = graph.graph.find_nodes(op="output")
        assert list(text.returns) == [n.name for n in output.all_input_nodes]


def test_a_weight_made_of_others_computes_nothing() -> None:
    node = read_node("%w: float32[4, 2] = aten.cat([weight 'a', weight 'b'], 0)")
    assert node is not None
    assert node.op is None
    assert node.inputs == ()
    made = read_node("%x: float32[2] = aten.full([2], 1.0)")
    assert made is not None
    assert made.op == "aten.full"


@pytest.mark.parametrize(
    "text",
    ["%x: float32[T] = input\n", "stage captured\nnonsense\n", "stage captured\n%y: float32[T] = aten.neg(%x)\n"],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(EngineFormatError):
        read_graph_text(text, Path("graph.txt"))
