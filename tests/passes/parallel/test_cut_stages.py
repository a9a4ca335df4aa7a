"""Stages run one after the other, and together they compute what the whole model does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from llmc.errors import PassError
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.graph.stages import stage_graphs
from llmc.options import BuildOptions, parse_options
from llmc.passes.pipeline import built_in, canonical, parallel
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.family_captures import FamilyCaptures
from tests.graph_builder import GraphBuilder, llama
from tests.passes.pass_checks import rewrites
from tests.passes.quantization.quantizing import quantized
from tests.tiny_models import FAMILIES, tiny_model, tiny_tokens

aten, ops = torch.ops.aten, torch.ops.llmc
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def cut(graph: ModelGraph, stages: int, *, ranks: int = 1, stop_after: int | None = None) -> PipelineResult:
    options = BuildOptions(pipeline_parallel_size=stages, tensor_parallel_size=ranks, stop_after=stop_after)
    return run_pipeline(graph, parallel(), options)


def handed(graph: ModelGraph) -> list[fx.Node]:
    """The crossings."""
    return [node for node in graph.graph.nodes if node.target is ops.hand_over.default]


def test_a_llama_in_two_stages(golden: Callable[[str, str], None]) -> None:
    graph, source = llama()
    result = cut(graph, 2)
    golden("passes/cut_stages.txt", render(result.graph))
    assert torch.equal(run_tokens(graph, source, TOKENS), run_tokens(result.graph, source, TOKENS))
    assert rewrites(cut(result.graph, 2).records) == 0
    assert [node.args[1] for node in handed(result.graph)] == [1]


def test_one_stage_changes_nothing() -> None:
    graph, _ = llama()
    assert rewrites(cut(graph, 1).records) == 0


def test_every_cut_runs_and_has_its_number() -> None:
    graph, source = llama(layers=3)
    assert rewrites(cut(graph, 3).records) == 2
    half = cut(graph, 3, stop_after=1).graph
    assert (half.pipeline_stages, len(handed(half))) == (2, 1)
    assert torch.equal(run_tokens(graph, source, TOKENS), run_tokens(half, source, TOKENS))


def test_stages_take_about_as_long() -> None:
    """Six equal layers: two in each of three stages."""
    graph, _ = llama(layers=6)
    seen, layers = [], 0
    for node in cut(graph, 3).graph.graph.nodes:
        if node.target is ops.hand_over.default:
            seen.append(layers)
        layers += node.target is ops.attention.default
    assert seen == [2, 4]


def test_angles_are_computed_in_each_stage() -> None:
    """They follow from positions, and so do not cross."""
    graph, _ = llama(layers=2)
    (node,) = handed(cut(graph, 2).graph)
    assert tuple(node.meta["val"].shape[1:]) == (8,)


@pytest.mark.parametrize("scheme", ["int8", "q4_1"])
def test_a_tied_matrix_of_codes_is_in_both_stages(scheme: str) -> None:
    """Its codes do not cross: each stage that reads the matrix decodes it."""
    options = parse_options({})
    model = capture(tiny_model("llama", tie_word_embeddings=True, hidden_size=64, intermediate_size=64), options)
    captured = Captured(run_pipeline(model.graph, canonical(), options).graph, model.source)
    graph = quantized(f"{scheme},lm_head={scheme}", captured=captured).graph
    result = cut(graph, 2).graph
    assert [node.args[1] for node in handed(result)] == [1]
    codes = [{name for name in stage.weights if "embed" in name or "lm_head" in name} for stage in stage_graphs(result)]
    assert codes[0] and codes[0] == codes[1]
    assert torch.equal(run_tokens(graph, captured.source, TOKENS), run_tokens(result, captured.source, TOKENS))


def test_what_two_cuts_later_is_read_crosses_both() -> None:
    b = GraphBuilder()
    first = b.embedded(16)
    h = first
    for layer in range(3):
        q, k, v = (
            b.call(aten.reshape.default, b.linear(h, f"layers.{layer}.{name}", 16), [-1, 2, 8])
            for name in ("q", "k", "v")
        )
        h = b.call(aten.reshape.default, b.call(ops.attention.default, q, k, v, 0.5), [-1, 16])
    graph, source = b.finish(b.call(aten.add.Tensor, h, first))
    result = cut(graph, 3).graph
    assert [node.args[1] for node in handed(result)] == [1, 1, 2, 2]
    assert torch.equal(run_tokens(graph, source, TOKENS), run_tokens(result, source, TOKENS))


@pytest.mark.parametrize(("layers", "most"), [(1, 1), (2, 2)])
def test_more_stages_than_layers(layers: int, most: int) -> None:
    graph, _ = llama(layers=layers)
    with pytest.raises(PassError, match=f"cut into 3 stages: {layers} of its layers attend") as caught:
        cut(graph, 3)
    assert caught.value.at == "pipeline_parallel_size=3"
    assert str(caught.value.fix).endswith(f"pipeline_parallel_size={most}")


# Pre- and post-norms with two kinds of layers, learned positions, and a merged product on two ranks.
QUICK = (("gemma2", 1), ("gpt2", 1), ("phi3", 2))


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param(family, n, marks=() if (family, n) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for n in (1, 2)
    ],
)
def test_families(family: str, ranks: int, captured_family: FamilyCaptures) -> None:
    """Whole models through all passes: the same bits as uncut ones, on one rank a stage and on two."""
    captured = captured_family(family).captured
    uncut, stages = (
        run_pipeline(
            captured.graph, built_in(), BuildOptions(pipeline_parallel_size=n, tensor_parallel_size=ranks)
        ).graph
        for n in (1, 2)
    )
    assert stages.pipeline_stages == 2
    tokens = tiny_tokens(33)
    expected, actual = (run_tokens(graph, captured.source, tokens, chunk_sizes=(20, 13)) for graph in (uncut, stages))
    assert torch.equal(actual, expected)
