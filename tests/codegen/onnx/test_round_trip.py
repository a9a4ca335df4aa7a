"""What is exported and read again is the same canonical graph: the same calls, whatever their results are called."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import fx

from llmc.api.build_stages import Stages
from llmc.codegen.onnx.model_files import write_model_files
from llmc.debug.onnx_oracle import nothing
from llmc.exporter import graph_at
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.call_arguments import call_arguments
from llmc.graph.render import op_name
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from tests.codegen.onnx.test_stages import FAMILIES, RECURRENT

OPTIONS = BuildOptions(dtype="float32")
# Read again as other calls, or not at all.
OTHERWISE = {
    ("phimoe", Stage.CAPTURED): "its router scatters",
    ("qwen3_next", Stage.CANONICAL): "a norm is found in another order",
    ("xlstm", Stage.CAPTURED): "a norm is found in another order",
    ("recurrent_gemma", Stage.CANONICAL): "its gates are experts of all tokens",
    ("recurrent_gemma", Stage.CAPTURED): "a view of strides that a file does not keep",
    ("kimi_linear", Stage.CAPTURED): "it writes into an empty tensor",
}


def calls(model: Captured) -> list[str]:
    """Of the canonical graph, with all arguments; values and sizes by the order in which they are first named."""
    sizes: dict[str, str] = {}
    graph = graph_at(model, Stage.CANONICAL, OPTIONS, default(), Stages(None)).graph
    numbers: dict[fx.Node, str] = {}
    lines = []
    for node in graph.find_nodes(op="placeholder")[:2]:
        numbers[node] = node.name
    for node in graph.nodes:
        if node.op == "call_function":
            given = fx.map_arg(call_arguments(node), lambda each: numbers.setdefault(each, f"%{len(numbers)}"))
            value = node.meta["val"]
            shape = re.sub(r"\bs\d+", partial(_numbered, sizes), str(value.shape)) if torch.is_tensor(value) else ""
            lines.append(f"{numbers.setdefault(node, f'%{len(numbers)}')}: {shape} = {op_name(node.target)}({given})")
    return lines


def _numbered(sizes: dict[str, str], size: re.Match[str]) -> str:
    return sizes.setdefault(size[0], f"S{len(sizes)}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [Stage.CANONICAL, Stage.CAPTURED])
@pytest.mark.parametrize("family", (*FAMILIES, *RECURRENT))
def test_the_canonical_graph_is_the_same(
    family: str,
    stage: Stage,
    captured: Callable[[str], Captured],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if (family, stage) in OTHERWISE:
        request.applymarker(pytest.mark.xfail(strict=True, reason=OTHERWISE[family, stage]))
    model = captured(family)
    write_model_files(graph_at(model, stage, OPTIONS, default(), Stages(None)), model.source, tmp_path, nothing)
    assert calls(capture(tmp_path / "model.onnx", OPTIONS)) == calls(model)
