"""Weights in every blocked format are cut between their groups, with any number of super-blocks per row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx

from llmc.formats.code_format import CODE_FORMATS, CODE_PARTS, RUN_UNIT, TOKEN_GROUP
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.call_arguments import call_arguments
from llmc.graph.code_numbers import code_dtype
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import built_in
from llmc.passes.runner import run_pipeline
from tests.gguf_families import family_model
from tests.gguf_files import write_gguf
from tests.graph_builder import GraphBuilder, TensorSource
from tests.passes.parallel.test_partition import close, cut
from tests.tiny_models import tiny_tokens

aten, ops = torch.ops.aten, torch.ops.llmc
BLOCKED = [name for name, codes in CODE_FORMATS.items() if codes.is_blocked]


def products(format: str, inner: int, rounded: str = "none", outer: int = 96) -> tuple[ModelGraph, TensorSource]:
    """A product whose rows are cut, and one whose columns are, with codes of a format."""
    b = GraphBuilder()
    x = b.call(aten.gelu.default, b.linear(b.embedded(outer), "up", inner))
    if rounded != "none":
        x = b.call(ops.round_tokens.default, x, None, rounded, torch.float32, TOKEN_GROUP)
    codes = CODE_FORMATS[format]
    run, group = codes.run, codes.group
    assert run is not None and group is not None
    low, high = codes.integers or (0, 16)
    integers = b.generator

    def numbers(name: str, count: int, low: int, high: int, dtype: torch.dtype) -> fx.Node:
        node = b.weight(f"down.{name}", outer, count, dtype=dtype)
        b.source.tensors[f"down.{name}"] = torch.randint(low, high, (outer, count), generator=integers).to(dtype)
        return node

    def floats(name: str) -> fx.Node:
        return b.weight(f"down.{name}", outer, inner // run)

    steps = codes.steps
    parts: dict[str, fx.Node | None] = dict.fromkeys(CODE_PARTS)
    parts["codes"] = numbers("codes", inner, low, high, code_dtype(format))
    parts["scales"] = floats("scales")
    if steps is not None:
        parts["scale_steps"] = numbers("scale_steps", inner // group, steps.least, steps.least + 9, torch.int8)
    if codes.has_minimum:
        parts["minima"] = floats("minima")
        if steps is not None:
            parts["minimum_steps"] = numbers("minimum_steps", inner // group, 0, 9, torch.int8)
    stored, scales, zeros, *more = parts.values()
    weight = b.call(ops.dequantize.default, stored, scales, zeros, format, torch.float32, *more)
    return b.finish(b.call(ops.linear.default, x, weight))


def stored_as(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """The shapes of the parts that a rank has of the weight."""
    (node,) = graph.graph.find_nodes(op="call_function", target=ops.dequantize.default)
    return {
        name: tuple(part.meta["val"].shape) for name, part in call_arguments(node).items() if isinstance(part, fx.Node)
    }


# One super-block of 256 columns per row, two, and three; of formats without steps more. In few columns no cut pays.
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("columns", [256, 512, 768])
@pytest.mark.parametrize("format", BLOCKED)
def test_columns_are_cut_between_groups(format: str, columns: int, ranks: int) -> None:
    """Ranks with parts of one super-block each have its float."""
    graph, source = products(format, columns)
    result = cut(graph, ranks).graph
    close(graph, result, source)
    whole, part = (stored_as(cut_graph)["codes"][1] for cut_graph in (graph, result))
    assert part % RUN_UNIT == 0 and part < whole


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("format", [name for name in BLOCKED if CODE_FORMATS[name].steps is None])
def test_few_groups(format: str, runs: int) -> None:
    """A single group is not cut, and an odd number of them is cut between two."""
    graph, source = products(format, runs * RUN_UNIT, outer=8)
    result = cut(graph, 2).graph
    close(graph, result, source)
    assert stored_as(result)["codes"][1] == min(runs, 2) * RUN_UNIT


def test_ranks_share_the_float_of_a_super_block() -> None:
    graph, _ = products("q4_k", 256)
    assert stored_as(cut(graph, 2).graph) == {
        "codes": (96, 128),
        "scales": (96, 1),
        "scale_steps": (96, 4),
        "minima": (96, 1),
        "minimum_steps": (96, 4),
    }


@pytest.mark.parametrize("format", BLOCKED)
def test_groups_of_tokens_are_cut_as_those_of_weights(format: str) -> None:
    """So each rank rounds a token's channels to the codes of one rank."""
    graph, source = products(format, 512, "int8")
    result = cut(graph, 2).graph
    assert result.ranks == 2
    close(graph, result, source)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_experts(kind: str, by_expert: bool, tmp_path: Path) -> None:
    """One super-block per row, or the experts themselves on different ranks."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "intermediate_size": 256}
    path = tmp_path / "experts.gguf"
    write_gguf(path, family_model("qwen3_moe", **sizes), kind)
    captured = capture(path, BuildOptions(dtype="float32"))
    alone, together = (_on_ranks(captured, n, by_expert=by_expert) for n in (1, 2))
    assert together.ranks == 2
    expected, actual = (run_tokens(graph, captured.source, tiny_tokens(9, 60)) for graph in (alone, together))
    assert float((actual - expected).abs().max()) <= 1e-4 * float(expected.max() - expected.min())


def _on_ranks(captured: Captured, ranks: int, *, by_expert: bool) -> ModelGraph:
    options = BuildOptions(tensor_parallel_size=ranks, enable_expert_parallel=by_expert and ranks > 1, dtype="float32")
    return run_pipeline(captured.graph, built_in(), options, data=ModelData(captured.source)).graph
