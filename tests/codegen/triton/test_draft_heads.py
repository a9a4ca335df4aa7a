"""Heads on a GPU: kernels through the interpreter against the graph itself, and engines that compile offline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.codegen.triton.device_lowered import DeviceLowered
from llmc.codegen.triton.lowering import lower_device
from llmc.compiler import build
from llmc.engine_format import read_engine
from llmc.frontends.checkpoints.joined_source import JoinedSource
from llmc.frontends.drafts.medusa import read_medusa
from llmc.graph.draft_records import PREFIX
from llmc.graph.execute import Chunk, sequence_inputs
from llmc.graph.interpreter import GraphInterpreter
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource, evaluate
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import draft_heads, fusion, serving
from llmc.passes.runner import run_pipeline
from llmc.program import StepOutput
from llmc.program.step_outputs import DRAFT_IDS, DRAFT_LOGPROBS
from llmc.runtime.sampling.row_choice import BEST, RowChoices
from tests.codegen.triton.device_harness import interpreter, step_arrays
from tests.gpu_target import gpu_target
from tests.graph_builder import llama
from tests.medusa_heads import medusa_1
from tests.tiny_models import tiny_checkpoint

TOKENS = (5, 3, 11, 2, 7)
SIDES = (DRAFT_IDS, DRAFT_LOGPROBS)
OPTIONS = BuildOptions(max_model_len=64, max_batch_tokens=16, max_logit_rows=16)


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceLowered, ModelGraph, WeightSource]:
    graph, source = llama(layers=1)
    file = tmp_path_factory.mktemp("heads") / "heads.safetensors"
    medusa_1(file, 8)
    heads = read_medusa(file)
    both = JoinedSource(source, heads.source, PREFIX)
    passes = (*serving(), *draft_heads(), *fusion())
    optimized = run_pipeline(replace(graph, medusa=heads), passes, OPTIONS, data=ModelData(both)).graph
    return lower_device(optimized, gpu_target("h100"), OPTIONS), optimized, both


def test_interpreted_kernels_give_what_the_graph_gives(
    lowered: tuple[DeviceLowered, ModelGraph, WeightSource], tmp_path: Path
) -> None:
    device, graph, source = lowered
    executor = interpreter(device, source, 1, tmp_path)
    step = step_arrays([Chunk(0, 0, TOKENS)], 16, 1)
    (inputs,) = sequence_inputs(graph, TOKENS, chunk_sizes=[len(TOKENS)], block_size=16)
    weights = {node.name: evaluate(graph.weights[node.name], source) for node in graph.weight_nodes()}
    logits, ids, logprobs = GraphInterpreter(graph.graph).outputs(inputs | weights)
    for sides in ((), SIDES):
        actual = torch.from_numpy(executor.step(replace(step, sides=sides)).copy())
        torch.testing.assert_close(actual, logits, rtol=1e-4, atol=1e-4)
    assert np.array_equal(executor.side_output(DRAFT_IDS), ids.numpy())
    np.testing.assert_allclose(executor.side_output(DRAFT_LOGPROBS), logprobs.numpy(), rtol=1e-4, atol=1e-4)
    for sides in ((), SIDES):
        chosen = executor.choose(replace(step, sides=sides), StepOutput.BEST, RowChoices.of([BEST] * len(TOKENS)))
        assert chosen.tokens.tolist() == logits.argmax(-1).tolist()


def test_one_product_reads_the_output_matrix(lowered: tuple[DeviceLowered, ModelGraph, WeightSource]) -> None:
    program = lowered[0].program
    for wanted in (StepOutput.LOGITS, StepOutput.BEST):
        for sides in ((), SIDES):
            here = [x for x in program.launches if x.runs(tokens=2, logit_rows=2, wanted=wanted, sides=sides)]
            readers = [x for x in here if any("lm_head" in name or "best" in name for name in x.origin.nodes)]
            products = [x for x in readers if "weight_ptr" in x.arguments]
            assert len(products) == 1
            assert (str(products[0].arguments["tokens"]) == "3*L") == bool(sides)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"quantize": "w4a8", "kv_cache": "int8"}])
def test_engines_with_heads_compile_for_a_gpu(tmp_path: Path, options: dict[str, str]) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", hidden_size=128, intermediate_size=256)
    medusa_1(tmp_path / "heads.safetensors", 128)
    limits = {"max_model_len": 64, "max_batch_tokens": 2, "max_sequences": 2, "max_logit_rows": 2}
    heads = tmp_path / "heads.safetensors"
    build(model, tmp_path / "e.llmc", target="h100", dtype="bfloat16", speculative=heads, **limits, **options)  # type: ignore[arg-type]
    program = read_engine(tmp_path / "e.llmc", check_machine=False).program
    assert [side.name for side in program.side_outputs] == [DRAFT_IDS, DRAFT_LOGPROBS]
    assert all(kernel.binaries for kernel in program.launched_kernels())
