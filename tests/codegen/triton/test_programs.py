"""Whole steps of GPU programs, interpreted: the eager graph's logits in mixed batches, and Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.frontends.capture import capture
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.execute import Chunk, run_steps
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.program.program_json import program_from_json, program_to_json
from tests.codegen.test_engine import MIXED_STEPS
from tests.codegen.tiny_models import VOCABULARY, gemma2, gpt2, llama
from tests.codegen.triton.device_harness import interpret_steps, interpreter
from tests.end_to_end.logits import assert_close, torch_logits
from tests.gpu_target import gpu_target
from tests.tiny_models import tiny_checkpoint, tiny_model, tiny_tokens
from tests.tolerances import GPU_STEPS
from tests.tree_steps import TABLE, check_trees

Model = Callable[[torch.dtype], tuple[ModelGraph, MemorySource]]

# fp16: the eager reference rounds where a kernel keeps fp32.
H100 = gpu_target("h100")


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(gpt2, torch.float16, id="gpt2-f16"),
        pytest.param(gemma2, torch.float32, id="gemma2-f32"),
        pytest.param(llama, torch.float16, id="llama-f16", marks=pytest.mark.slow),
        pytest.param(llama, torch.float32, id="llama-f32", marks=pytest.mark.slow),
        pytest.param(gpt2, torch.float32, id="gpt2-f32", marks=pytest.mark.slow),
        pytest.param(gemma2, torch.float16, id="gemma2-f16", marks=pytest.mark.slow),
    ],
)
def test_equals_the_graph(model: Model, dtype: torch.dtype, tmp_path: Path) -> None:
    graph, source = model(dtype)
    lowered = lower_device(graph, H100, BuildOptions())
    got = interpret_steps(lowered, source, MIXED_STEPS, tmp_path)
    want = run_steps(graph, source, MIXED_STEPS)
    for got_step, want_step in zip(got, want, strict=True):
        for ours, reference in zip(got_step, want_step, strict=True):
            worst = (ours - reference).abs().max().item()
            assert worst <= GPU_STEPS[dtype] * reference.std().item(), f"max |Δ| {worst}"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "gemma2"))])
def test_equals_hugging_face(family: str, tmp_path: Path) -> None:
    """A prompt in two chunks, then a single token, in fp32."""
    options = BuildOptions(max_batch_tokens=64, max_logit_rows=64)
    captured = capture(tiny_checkpoint(family, tmp_path / "model"), options)
    graph = run_pipeline(captured.graph, default(), options).graph
    lowered = lower_device(graph, H100, options)
    tokens = tiny_tokens(21)
    cuts = (0, 17, 20, 21)
    steps = tuple((Chunk(0, a, tuple(tokens[a:b])),) for a, b in pairwise(cuts))
    got = torch.cat([part for step in interpret_steps(lowered, captured.source, steps, tmp_path) for part in step])
    assert_close(got.numpy(), torch_logits(tiny_model(family), tokens))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "nodes"), [(0, 4), *(pytest.param(1, nodes, marks=pytest.mark.slow) for nodes in (18, 55))]
)
def test_trees_have_the_logits_of_their_chains(seed: int, nodes: int, tmp_path: Path) -> None:
    """Up to rounding: what is hidden is masked, not left out."""
    graph, source = llama(torch.float32, layers=1)
    lowered = lower_device(graph, H100, BuildOptions())
    executor = interpreter(lowered, source, len(TABLE), tmp_path)
    check_trees(executor, lowered.program.limits.block_size, VOCABULARY, nodes, seed, tolerance=1e-4)


def test_the_program_survives_json() -> None:
    program = lower_device(gemma2(torch.float32)[0], H100, BuildOptions()).program
    assert program_from_json(program_to_json(program), Path("program.json")) == program


def test_lowering_repeats_itself() -> None:
    texts = {program_to_json(lower_device(llama(torch.float32)[0], H100, BuildOptions()).program) for _ in range(2)}
    assert len(texts) == 1


def test_identical_layers_share_their_kernels() -> None:
    two, four = (lower_device(llama(layers=n)[0], H100, BuildOptions()).program for n in (2, 4))
    assert len(four.launches) > len(two.launches)
    assert four.kernels == two.kernels
