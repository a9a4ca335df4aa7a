"""Graphs as text: the round trip computes the same, and nothing outside the grammar is read or written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from llmc.errors import EngineFormatError, LoweringError
from llmc.graph.serialize import deserialize_graph, serialize_graph
from tests.runtime.tiny_engine import tiny_graph, tiny_model

AT = Path("e.llmc/graph.json")


def test_round_trip() -> None:
    graph = tiny_graph(tiny_model())
    text = serialize_graph(graph)
    read = deserialize_graph(text, AT)
    assert str(read) == str(graph.graph)
    graph.graph = read
    assert serialize_graph(graph) == text


@pytest.mark.parametrize(
    "argument",
    [
        1,
        -2.5,
        True,
        None,
        "silu",
        float("inf"),
        [1, [2, None]],
        torch.bfloat16,
        torch.contiguous_format,
        torch.device("cpu"),
    ],
)
def test_arguments_survive(argument: Any) -> None:
    graph = tiny_graph(tiny_model())
    graph.graph = fx.Graph()
    x = graph.graph.placeholder("x")
    graph.graph.output(graph.graph.call_function(torch.ops.aten._to_copy.default, (x, argument), {"key": argument}))
    node = list(deserialize_graph(serialize_graph(graph), AT).nodes)[1]
    assert node.args[1] == argument == node.kwargs["key"]
    assert type(node.args[1]) is type(argument) or isinstance(argument, list)


def test_what_cannot_be_written() -> None:
    graph = tiny_graph(tiny_model())
    x = next(iter(graph.graph.nodes))
    with graph.graph.inserting_after(x):
        node = graph.graph.call_function(torch.ops.aten.linalg_det.default, (x,))
    with pytest.raises(LoweringError, match=r"aten.linalg_det.default cannot run in a reference engine"):
        serialize_graph(graph)
    node.target = torch.ops.aten.neg.default
    unknown: Any = object()
    node.args = (x, unknown)
    with pytest.raises(LoweringError, match="cannot be written"):
        serialize_graph(graph)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(version=9),
        lambda c: c.pop("nodes"),
        lambda c: c["nodes"][0].update(op="call_method"),
        lambda c: c["nodes"][0].update(name="__import__('os')"),
        lambda c: c["nodes"][1].update(name=c["nodes"][0]["name"]),
        lambda c: c["nodes"][-2].update(target="os.system"),
        lambda c: c["nodes"][-2].update(target="aten.linalg_det.default"),
        lambda c: c["nodes"][-2].update(args=[{"node": "nowhere"}]),
        lambda c: c["nodes"][-2].update(args=[{"eval": "1"}]),
        lambda c: c["nodes"][-2].update(args=[{"dtype": "__class__"}]),
        lambda c: c["nodes"][-2].update(args=[{"device": "cuda"}]),
        lambda c: c.update(nodes=[7]),
    ],
)
def test_what_is_no_graph(change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(serialize_graph(tiny_graph(tiny_model())))
    change(content)
    with pytest.raises(EngineFormatError, match="the graph cannot be read") as caught:
        deserialize_graph(json.dumps(content), AT)
    assert caught.value.fix


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000])
def test_what_is_no_object(text: str) -> None:
    with pytest.raises(EngineFormatError, match="the graph cannot be read"):
        deserialize_graph(text, AT)
