"""Steps that a CudaExecutor queues before the last one has ended, on a stand-in for the device that runs nothing until
somebody waits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.options import parse_options
from llmc.program import Program, StepOutput
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.executors.cuda import CudaExecutor
from llmc.runtime.executors.executor import QueueingExecutor
from llmc.runtime.loop.step import Step
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.request import Origin
from llmc.runtime.sampling.row_choice import RowChoice, RowChoices
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.codegen.tiny_models import llama
from tests.gpu_target import gpu_target
from tests.runtime.device.decode_step import decodes
from tests.runtime.executors.fake_device import FakeDriver, fake_executor, with_binaries

BLOCKS = 64
CONTEXTS = [30, 5, 60]
SHAPE = StepShape(4, 4, 4, 64)


@cache
def program() -> Program:
    limits = {"max_batch_tokens": 64, "max_logit_rows": 16, "max_model_len": 64, "max_sequences": 8}
    return with_binaries(lower_device(llama(torch.bfloat16)[0], gpu_target("h100"), parse_options(limits)).program)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaExecutor, FakeDriver]:
    """Graphs for the steps of CONTEXTS, fed or not, in both lanes; what is queued from now on is held."""
    executor, driver = fake_executor(program(), BLOCKS, monkeypatch)
    for _ in range(2):
        executor.choose(step_of(0), StepOutput.DRAWN, drawn(0))
        for number in range(2):
            executor.queue(step_of(number), StepOutput.DRAWN, drawn(number), is_fed=True)()
    assert driver.replays == 3
    driver.is_held = True
    driver.taken()
    driver.waits.clear()
    return executor, driver


def step_of(number: int) -> Step:
    """The step of that number of three requests that decode."""
    step = decodes([context + number for context in CONTEXTS])
    return replace(step, block_tables=step.block_tables % BLOCKS, input_ids=step.input_ids + number)


def drawn(number: int) -> RowChoices:
    return RowChoices.of([RowChoice(0.5, 2**31 - 1, 1.0, 0.0, 3, 4 + number)] * 3)


def choose_on_device(executor: CudaExecutor, tokens: list[int]) -> None:
    """The tokens that the next step to run leaves, as no kernel runs."""
    executor._chosen[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)


def seen(executor: CudaExecutor, name: str) -> list[int]:
    """An input of the last step that ran, as the device has it."""
    start = SHAPE.input_offsets()[name]
    return executor._inputs[start : start + 12].view(torch.int32).tolist()


def spoil(step: Step) -> None:
    for _, values in step.arrays():
        values[:] = 0


def test_a_queued_step_waits_for_nothing_and_begins_from_the_tokens_of_the_last(
    made: tuple[CudaExecutor, FakeDriver],
) -> None:
    executor, driver = made
    assert isinstance(executor, QueueingExecutor)
    steps = [step_of(number) for number in range(4)]
    reads = []
    for number in range(2):
        reads.append(executor.queue(steps[number], StepOutput.DRAWN, drawn(number), is_fed=number > 0))
        spoil(steps[number])
    assert not driver.taken(), "nothing has run"
    for number in range(4):
        # Those of the step before, from which a fed one begins; no kernel chooses others.
        tokens = [7 + number, 8, 9]
        choose_on_device(executor, tokens)
        chosen = reads[number]()
        assert driver.taken()
        assert chosen.tokens.tolist() == tokens
        assert seen(executor, "input_ids") == (tokens if number else step_of(0).input_ids.tolist())
        assert seen(executor, "positions") == step_of(number).positions.tolist()
        assert seen(executor, "context_lens") == [context + number for context in CONTEXTS]
        assert seen(executor, "counters") == [4 + number] * 3
        if number < 2:
            reads.append(executor.queue(steps[number + 2], StepOutput.DRAWN, drawn(number + 2), is_fed=True))
            spoil(steps[number + 2])
            assert chosen.tokens.tolist() == tokens, "the step after the next one overwrites them"


def test_tokens_that_are_none_are_not_fed(made: tuple[CudaExecutor, FakeDriver]) -> None:
    executor, _ = made
    reads = [executor.queue(step_of(n), StepOutput.DRAWN, drawn(n), is_fed=n > 0) for n in range(2)]
    reads[0]()
    choose_on_device(executor, [-5, 2**31 - 1, 3])
    reads[1]()
    assert seen(executor, "input_ids") == [0, program().vocab_size - 1, 3]


def test_a_step_takes_no_lane_whose_step_has_not_ended(made: tuple[CudaExecutor, FakeDriver]) -> None:
    executor, driver = made
    for number in range(3):
        executor.queue(step_of(number), StepOutput.DRAWN, drawn(number), is_fed=number > 0)
    # The third has waited for the first, and for no other.
    assert driver.waits[-1] == (5, 4)
    executor.queue(step_of(3), StepOutput.DRAWN, drawn(3))
    assert driver.waits[-1] == (6, 6)


def test_the_loop_queues_a_step_before_it_waits_for_the_last(made: tuple[CudaExecutor, FakeDriver]) -> None:
    executor, driver = made
    loop = StepLoop(executor, program().limits, BLOCKS, program=program())
    end = Ending(frozenset(), frozenset(), 60)
    prompt = [3, 4, 5]
    driver.is_held = False
    requests = []
    for _ in range(3):
        sampler = Sampler(SamplingParams(), np.array(prompt), program().vocab_size, np.zeros(0, np.int64))
        requests.append(Generation(prompt, sampler, end, origin=Origin(salt=None)))
        loop.add(requests[-1])
    for _ in range(12):
        loop.step()
    driver.is_held = True
    counts: list[Any] = []
    for _ in range(20):
        driver.waits.clear()
        loop.step()
        counts.append(driver.waits[-1][0] - driver.waits[-1][1])
    assert counts == [1] * 20
    while not loop.scheduler.idle:
        loop.step()
    assert [len(request.output) for request in requests] == [57] * 3
    assert loop.pool.used == 0
