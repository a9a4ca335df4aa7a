"""Pipeline stages on a stand-in for the device, which records launches and runs copies and graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.graph.stages import stage_graphs
from llmc.options import parse_options
from llmc.passes.pipeline import fusion, parallel, serving
from llmc.passes.runner import run_pipeline
from llmc.program import HIDDEN, Program, RankLayout, StepOutput
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.program import calls_of_step, plan_calls
from llmc.runtime.loop.step import Step
from llmc.runtime.memory import zeros
from llmc.runtime.ranks.device_part import compute_part, taken_chosen
from llmc.runtime.ranks.rank_memory import MemoryLayout, RankMemory
from llmc.runtime.sampling.row_choice import BEST, RowChoices
from tests.gpu_target import gpu_target
from tests.graph_builder import llama
from tests.runtime.device.decode_step import decodes
from tests.runtime.executors.fake_device import FakeDriver, fake_executor, with_binaries

BLOCKS, CONTEXTS = 64, [30, 5, 60]
LIMITS = {"max_batch_tokens": 32, "max_logit_rows": 16, "max_model_len": 64, "max_sequences": 8}


@cache
def programs(stages: int) -> tuple[Program, ...]:
    options = parse_options({**LIMITS, "pipeline_parallel_size": stages})
    cut = run_pipeline(llama()[0], (*parallel(), *serving(), *fusion()), options).graph
    lowered = (lower_device(stage, gpu_target("h100"), options).program for stage in stage_graphs(cut))
    return tuple(with_binaries(program) for program in lowered)


def step_of(tokens: int = 1) -> Step:
    step = decodes(CONTEXTS)
    return replace(step, block_tables=step.block_tables % BLOCKS, input_ids=step.input_ids + tokens)


def shared_memory() -> RankMemory:
    width, vocabulary = programs(2)[1].hidden_width, programs(2)[1].vocab_size
    rows = LIMITS["max_logit_rows"], vocabulary
    layout = MemoryLayout(RankLayout(1, 2), 4096, 4096, (width,), LIMITS["max_batch_tokens"], rows)
    return RankMemory(zeros(layout.nbytes), layout)


def test_rows_go_from_one_device_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three steps of one bucket: the second captures a graph in each stage, the third replays it."""
    memory, count = shared_memory(), len(CONTEXTS)
    first, _ = fake_executor(programs(2)[0], BLOCKS, monkeypatch)
    written = []
    for number in range(3):
        first._logits.copy_(torch.randn(first._logits.shape, generator=torch.Generator().manual_seed(number)))
        rows = memory.rows(number, 1, count)
        compute_part(first, StepOutput.BEST, None, step_of(number), rows)
        assert np.array_equal(rows, first._logits[:count].numpy())
        written.append(rows.copy())
    last, driver = fake_executor(programs(2)[1], BLOCKS, monkeypatch)
    best, replays = RowChoices.of([BEST] * count), []
    for number, rows in enumerate(written):
        tokens = torch.tensor([number, 7, 11], dtype=torch.int32)
        last._chosen[0, :count] = tokens
        result = memory.logits(number, count)
        compute_part(last, StepOutput.BEST, best, replace(step_of(number), hidden=rows), result)
        shape = StepShape.of(replace(step_of(number), hidden=rows))
        assert np.array_equal(inputs_of_bucket(last._inputs, shape), rows)
        assert taken_chosen(result).tokens.tolist() == tokens.tolist()
        replays.append(driver.replays)
    assert replays == [0, 1, 2]


def inputs_of_bucket(inputs: torch.Tensor, shape: StepShape) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The rows that the device has for the step's tokens; its bucket has four requests."""
    start = replace(shape, tokens=4, logit_rows=4, requests=4, max_blocks=64).input_offsets()[HIDDEN]
    rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = (
        inputs[start : start + 4 * shape.tokens * shape.hidden].view(torch.float32).view(shape.tokens, -1).numpy()
    )
    return rows


def launched(stages: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The launches of a greedy decode of three requests on all stages, by family."""
    total = Counter[str]()
    for program in programs(stages):
        executor, driver = fake_executor(program, BLOCKS, monkeypatch)
        rows = np.zeros((len(CONTEXTS), program.hidden_width), np.float32) if program.hidden_width else None
        step = replace(step_of(), hidden=rows)
        if program.hands_over:
            executor.step(step)
        else:
            executor.choose(step, StepOutput.BEST, RowChoices.of([BEST] * len(CONTEXTS)))
        families = {kernel.name: kernel.function for kernel in program.kernels}
        total.update(families[event.file] for event in FakeDriver.taken(driver))
    return total


def test_stages_launch_what_one_stage_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages repeat what depends on a step's inputs only, and copy their rows."""
    alone, staged = launched(1, monkeypatch), launched(2, monkeypatch)
    assert alone and not alone - staged, alone - staged


def test_a_step_for_the_next_stage_chooses_nothing() -> None:
    program = programs(2)[0]
    calls, counts = plan_calls(program), StepShape.of(step_of()).counts()
    for wanted in StepOutput:
        assert calls_of_step(calls, counts, wanted) == calls_of_step(calls, counts, StepOutput.LOGITS)
