"""Medusa heads in a graph: what they say, whose output matrix they share, what is refused, and nothing done twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.errors import CheckpointError, PassError
from llmc.frontends.checkpoints.joined_source import JoinedSource
from llmc.frontends.drafts.medusa import read_medusa
from llmc.graph.draft_records import PREFIX
from llmc.graph.execute import sequence_inputs
from llmc.graph.interpreter import GraphInterpreter
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.graph.weights import WeightSource, evaluate
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import quantization, serving
from llmc.passes.rewrite import Pass
from llmc.passes.runner import PipelineResult, run_pipeline
from llmc.passes.speculative.insert_medusa_heads import insert_medusa_heads
from tests.graph_builder import GraphBuilder, llama
from tests.medusa_heads import head_states, medusa_1, vllm
from tests.passes.pass_checks import rewrites, same_logits

TOKENS = (5, 3, 11, 2, 7, 1, 16)
WIDTH, VOCABULARY = 8, 17


def inserted(
    graph: ModelGraph, source: WeightSource, file: Path, before: Sequence[Pass] = (), **options: Any
) -> tuple[PipelineResult, WeightSource]:
    """The graph served, and with the heads of a file."""
    heads = read_medusa(file)
    both = JoinedSource(source, heads.source, PREFIX)
    passes = (*before, *serving(), insert_medusa_heads)
    return run_pipeline(replace(graph, medusa=heads), passes, BuildOptions(**options), data=ModelData(both)), both


def outputs(graph: ModelGraph, source: WeightSource, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """Logits and side outputs of one step."""
    (inputs,) = sequence_inputs(graph, tokens, chunk_sizes=[len(tokens)], block_size=16)
    weights = {node.name: evaluate(graph.weights[node.name], source) for node in graph.weight_nodes()}
    return GraphInterpreter(graph.graph).outputs(inputs | weights)


def test_heads_share_the_output_matrix_in_one_product(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    graph, source = llama(layers=1)
    file = tmp_path / "heads.safetensors"
    tensors = medusa_1(file, WIDTH, layers=2)
    result, both = inserted(graph, source, file)
    golden("passes/insert_medusa_heads.txt", render(result.graph))
    same_logits(graph, result.graph, both, tolerance=1e-6)
    for tokens in (TOKENS, TOKENS[:3]):
        logits, ids, logprobs = outputs(result.graph, both, tokens)
        states = hidden_states(result.graph, both, tokens)
        torch.testing.assert_close(logits, states @ source.tensors["embed"].T)
        for head in range(2):
            wanted = head_states(tensors, head, states) @ source.tensors["embed"].T
            check_candidates(ids[:, head], logprobs[:, head], wanted)
    again = run_pipeline(result.graph, (insert_medusa_heads,), BuildOptions(), data=ModelData(both))
    assert rewrites(again.records) == 0 and render(again.graph) == render(result.graph)


def test_nothing_without_the_option() -> None:
    graph, source = llama(layers=1)
    records = run_pipeline(graph, (*serving(), insert_medusa_heads), BuildOptions(), data=ModelData(source)).records
    assert records[-1].name == "insert_medusa_heads" and rewrites(records[-1:]) == 0


def test_own_output_matrices_that_are_the_models_are_shared(tmp_path: Path) -> None:
    graph, source = llama(layers=1)
    file = tmp_path / "heads.safetensors"
    medusa_1(file, WIDTH, outputs=source.tensors["embed"])
    result, _ = inserted(graph, source, file)
    assert heads_products(result.graph) == 2, "the model's and the one of all rows"


@pytest.mark.parametrize("scheme", ["int8", "w8a8"])
def test_a_quantized_output_matrix_is_shared_with_how_its_rows_arrive(tmp_path: Path, scheme: str) -> None:
    graph, source = llama(layers=1)
    file = tmp_path / "heads.safetensors"
    medusa_1(file, WIDTH, outputs=source.tensors["embed"])
    result, both = inserted(graph, source, file, before=quantization(), quantize=scheme)
    assert heads_products(result.graph) == 2
    first, second = result.graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.lm_head.default)
    assert first.args[1] is second.args[1], "the same codes"
    assert first.args[0].target is second.args[0].target or scheme == "int8"
    assert outputs(result.graph, both, TOKENS)[1].shape == (7, 2, 10)


def test_own_output_matrices_of_few_tokens(tmp_path: Path) -> None:
    graph, source = llama(layers=1)
    file = tmp_path / "heads.safetensors"
    generator = torch.Generator().manual_seed(3)
    own = [torch.randn(4, WIDTH, generator=generator) for _ in range(2)]
    token_map = torch.tensor([16, 2, 9, 11])
    tensors = vllm(file, WIDTH, outputs=own, token_map=token_map)
    result, both = inserted(graph, source, file)
    _, ids, logprobs = outputs(result.graph, both, TOKENS)
    states = hidden_states(result.graph, both, TOKENS)
    for head in range(2):
        check_candidates(ids[:, head], logprobs[:, head], head_states(tensors, head, states) @ own[head].T, token_map)


def test_what_becomes_of_logits_becomes_of_the_heads_too(tmp_path: Path) -> None:
    b = GraphBuilder()
    logits = b.call(torch.ops.llmc.lm_head.default, b.embedded(WIDTH), b.embedding)
    graph, source = b.finish_with(b.call(torch.ops.aten.div.Tensor, logits, 4.0))
    file = tmp_path / "heads.safetensors"
    tensors = medusa_1(file, WIDTH, heads=1)
    result, both = inserted(graph, source, file)
    _, ids, logprobs = outputs(result.graph, both, TOKENS)
    states = source.tensors["embed"][list(TOKENS)]
    check_candidates(ids[:, 0], logprobs[:, 0], head_states(tensors, 0, states) @ source.tensors["embed"].T / 4)


def test_heads_of_another_model_are_refused_with_the_sizes(tmp_path: Path) -> None:
    graph, source = llama(layers=1)
    file = tmp_path / "heads.safetensors"
    medusa_1(file, 12)
    with pytest.raises(CheckpointError, match=r"'0.0.linear.weight' has shape \[12, 12\], expected \[8, 8\]") as caught:
        inserted(graph, source, file)
    assert caught.value.fix is not None and "llmc train-medusa" in caught.value.fix
    medusa_1(file, WIDTH, outputs=torch.ones(20, WIDTH))
    with pytest.raises(CheckpointError, match=r"'0.1.weight' has shape \[20, 8\], expected \[17, 8\]: built has 17"):
        inserted(graph, source, file)
    vllm(file, WIDTH, outputs=[torch.ones(2, WIDTH)] * 2, token_map=torch.tensor([3, 17]))
    with pytest.raises(CheckpointError, match="token_map names tokens from 3 to 17, and built has 17"):
        inserted(graph, source, file)


def test_own_output_matrices_that_are_half_the_model_are_refused(tmp_path: Path) -> None:
    graph, source = llama(layers=1)
    file = tmp_path / "heads.safetensors"
    medusa_1(file, WIDTH, heads=5, outputs=torch.ones(VOCABULARY, WIDTH))
    with pytest.raises(CheckpointError, match=r"have 680 weights, the whole model has \d+") as caught:
        inserted(graph, source, file)
    assert caught.value.fix is not None and "truncated vocabulary" in caught.value.fix


def test_logits_of_all_tokens_are_refused(tmp_path: Path) -> None:
    graph, source = llama(layers=1)
    file = tmp_path / "heads.safetensors"
    medusa_1(file, WIDTH)
    heads = read_medusa(file)
    both = JoinedSource(source, heads.source, PREFIX)
    others = tuple(pass_ for pass_ in serving() if pass_.name != "select_logit_rows")
    with pytest.raises(PassError, match="need an output projection for the rows asked for") as caught:
        run_pipeline(replace(graph, medusa=heads), (*others, insert_medusa_heads), BuildOptions(), data=ModelData(both))
    assert caught.value.fix is not None


def hidden_states(graph: ModelGraph, source: WeightSource, tokens: Sequence[int]) -> Tensor:
    """What the output projection reads."""
    tapped = graph.copy()
    product = tapped.graph.find_nodes(op="call_function", target=torch.ops.llmc.lm_head.default)[0]
    tapped.add_side_output("states", product.args[0])
    return outputs(tapped, source, tokens)[-1]


def check_candidates(ids: Tensor, logprobs: Tensor, logits: Tensor, token_map: Tensor | None = None) -> None:
    """They are the likeliest tokens of these logits."""
    values, places = torch.log_softmax(logits, -1).topk(ids.shape[-1])
    torch.testing.assert_close(logprobs, values, rtol=1e-4, atol=1e-5)
    assert torch.equal(ids.long(), places if token_map is None else token_map[places])


def heads_products(graph: ModelGraph) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.lm_head.default))
