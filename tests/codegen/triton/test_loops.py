"""Generated Triton loops compute what the graph's eager reference computes, in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.graph.execute import Chunk, run_steps
from llmc.graph.memory_source import MemorySource
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.targets import GpuTarget, resolve_target
from tests.codegen.random_graphs import random_graph
from tests.codegen.tiny_models import VOCABULARY
from tests.codegen.triton.device_harness import interpret_steps

# One token, and a prime number of them that is more than a tile.
STEPS = tuple((Chunk(0, 0, tuple(i % VOCABULARY for i in range(n))),) for n in (1, 37))


def h100() -> GpuTarget:
    target = resolve_target("h100")
    assert isinstance(target, GpuTarget)
    return target


def worst_difference(graph: ModelGraph, source: MemorySource, directory: Path) -> float:
    lowered = lower_device(graph, h100(), BuildOptions())
    got = interpret_steps(lowered, source, STEPS, directory)
    want = run_steps(graph, source, STEPS)
    pairs = [(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)]
    assert all(torch.isfinite(b).all() for _, b in pairs)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("seed", range(4))
def test_random_graphs(seed: int, tmp_path: Path) -> None:
    assert worst_difference(*random_graph(seed, 40), tmp_path) < 1e-5
