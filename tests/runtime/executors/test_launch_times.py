"""Launches are timed in order and in full, and timing changes no result."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.engine_format import read_engine
from llmc.errors import EngineFormatError
from llmc.graph.execute import Chunk
from llmc.options import BuildOptions
from llmc.runtime.executors.cpp import CppExecutor
from llmc.runtime.executors.executor import TimedExecutor
from llmc.runtime.loop.step import Step
from tests.codegen.tiny_models import gemma2
from tests.codegen.triton.device_harness import interpreter, step_arrays
from tests.gpu_target import gpu_target
from tests.runtime.executors.context_engine import compile_library, write_context_engine

STEP = (Chunk(0, 0, (3, 1, 4, 1, 5)), Chunk(1, 0, (9, 2)))


def test_the_interpreter_times_the_launches_that_a_step_has(tmp_path: Path) -> None:
    graph, source = gemma2(torch.float32)
    lowered = lower_device(graph, gpu_target("h100"), BuildOptions())
    executor = interpreter(lowered, source, 4, tmp_path)
    step = step_arrays(STEP, lowered.program.limits.block_size, 2)
    logits = executor.step(step).copy()
    assert isinstance(executor, TimedExecutor)
    times = executor.step_timed(step)
    present = [i for i, launch in enumerate(lowered.program.launches) if launch.runs(tokens=7, logit_rows=7)]
    assert {time.launch for time in times} <= set(present)
    assert [time.launch for time in times] == sorted(time.launch for time in times)
    assert all(0 <= time.start <= time.end for time in times)
    assert all(a.end <= b.start for a, b in pairwise(times))
    np.testing.assert_array_equal(executor.step(step), logits)


def test_a_library_without_clocks_says_so(tmp_path: Path) -> None:
    compile_library(tmp_path / "engine.so")
    directory = read_engine(write_context_engine(tmp_path / "context.llmc", tmp_path / "engine.so"))
    executor = CppExecutor(directory, 4, 1)
    with pytest.raises(EngineFormatError, match="cannot time its launches"):
        executor.step_timed(one_token())
    executor.close()


def one_token() -> Step:
    ones = np.zeros(1, np.int32)
    return Step(
        ones, ones, ones, np.asarray([0, 1], np.int32), ones + 1, ones.reshape(1, 1), ones, np.zeros(1, np.int64)
    )
