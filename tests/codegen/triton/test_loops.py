"""Generated Triton loops compute what the graph's eager reference computes, in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.compile import Workers, compile_program
from llmc.codegen.triton.lowering import lower_device
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.execute import Chunk, run_steps
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from tests.codegen.random_graphs import random_graph
from tests.codegen.test_loops import OPERATIONS
from tests.codegen.tiny_models import CHANNELS, VOCABULARY, GraphBuilder, aten, ops
from tests.codegen.triton.device_harness import interpret_steps
from tests.gpu_target import gpu_target
from tests.quick_sample import quick_sample

# One token, and a prime number of them that is more than a tile.
STEPS = tuple((Chunk(0, 0, tuple(i % VOCABULARY for i in range(n))),) for n in (1, 37))


def worst_difference(graph: ModelGraph, source: MemorySource, directory: Path) -> float:
    lowered = lower_device(graph, gpu_target("h100"), BuildOptions())
    got = interpret_steps(lowered, source, STEPS, directory)
    want = run_steps(graph, source, STEPS)
    pairs = [(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)]
    assert all(torch.isfinite(b).all() for _, b in pairs)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("seed", quick_sample(range(4), (0, 3)))
def test_random_graphs(seed: int, tmp_path: Path) -> None:
    assert worst_difference(*random_graph(seed, 40), tmp_path) < 1e-5


def every_operation() -> tuple[ModelGraph, MemorySource]:
    b = GraphBuilder()
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("x", VOCABULARY, CHANNELS, scale=1.0))
    y = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("y", VOCABULARY, CHANNELS, scale=1.0))
    joined = b.call(aten.cat.default, [build(b, x, y) for build in OPERATIONS.values()], 1)
    return b.finish(b.call(ops.select_rows.default, joined, b.inputs["logit_rows"]))


def test_every_operation(tmp_path: Path) -> None:
    graph, source = every_operation()
    lowered = lower_device(graph, gpu_target("h100"), BuildOptions())
    got = torch.cat([rows for step in interpret_steps(lowered, source, STEPS, tmp_path) for rows in step])
    want = torch.cat([rows for step in run_steps(graph, source, STEPS) for rows in step])
    for i, name in enumerate(OPERATIONS):
        columns = slice(i * CHANNELS, (i + 1) * CHANNELS)
        difference = (got[:, columns] - want[:, columns]).abs() / (1 + want[:, columns].abs())
        # The interpreter cuts bf16 off where a device rounds to the nearest.
        assert difference.max() < (2**-7 if name == "rounding" else 2e-6), name


def test_rows_wider_than_a_block(tmp_path: Path) -> None:
    """A reduction sweeps over the columns, once for each phase; the softmax has three."""
    b = GraphBuilder()
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("x", VOCABULARY, 9001, scale=1.0))
    normal = b.call(aten.mul.Tensor, b.call(aten._softmax.default, x, -1, False), 100.0)
    centred = b.call(aten.sub.Tensor, normal, b.call(aten.mean.dim, x, [-1], True))
    graph, source = b.finish(b.call(ops.select_rows.default, centred, b.inputs["logit_rows"]))
    lowered = lower_device(graph, gpu_target("h100"), BuildOptions())
    assert "for start in range(0, 9001, 8192):" in lowered.sources["kernels/loops.py"]
    ((got,),) = interpret_steps(lowered, source, STEPS[:1], tmp_path)
    ((want,),) = run_steps(graph, source, STEPS[:1])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["h100", pytest.param("mi300x", marks=pytest.mark.slow)])
def test_every_operation_compiles(name: str, workers: Workers, tmp_path: Path) -> None:
    """Without a GPU. Only the loop that computes all functions at once holds more values than there are registers."""
    target = gpu_target(name)
    lowered = lower_device(every_operation()[0], target, BuildOptions())
    for file, text in lowered.sources.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    program = compile_program(lowered.program, tmp_path, target, workers=workers)
    binaries = [kernel.binaries[target.arch_name] for kernel in program.launched_kernels()]
    assert all(b.registers > 0 for b in binaries)
    assert sum(b.spill_bytes > 0 for b in binaries) <= 1
    assert all((tmp_path / b.file).stat().st_size > 0 for b in binaries)
