"""Steps with prompts as graphs of a CudaExecutor, on a stand-in for the device: launches, inputs, and the warm-up."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.errors import RequestError
from llmc.options import parse_options
from llmc.program import Program, StepOutput
from llmc.runtime.device.decode_inputs import request_buckets
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.prompt_inputs import PromptSizes, prompt_sizes
from llmc.runtime.device.warm_up import warm_up_steps
from llmc.runtime.engine import Engine
from llmc.runtime.executors import cuda, cuda_opening
from llmc.runtime.executors.cuda import CudaExecutor
from llmc.runtime.executors.executor import WarmingExecutor
from llmc.runtime.loop.shared_loop import SharedLoop
from llmc.runtime.loop.step import Step
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.request import Origin
from llmc.runtime.sampling.row_choice import BEST, RowChoice, RowChoices
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.settings import settings
from tests.codegen.tiny_models import gemma2
from tests.gpu_target import gpu_target
from tests.runtime.device.decode_step import decodes
from tests.runtime.executors.fake_device import FakeDriver, fake_executor, with_binaries
from tests.runtime.executors.test_cuda_launches import expected

LIMITS = {"max_batch_tokens": 512, "max_logit_rows": 64, "max_model_len": 64, "max_sequences": 16}
BLOCKS = 300
TARGET = gpu_target("h100")


@cache
def program() -> Program:
    """Of layers with and without windows."""
    return with_binaries(lower_device(gemma2(torch.bfloat16)[0], TARGET, parse_options(LIMITS)).program)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaExecutor, FakeDriver]:
    return fake_executor(program(), BLOCKS, monkeypatch, prompts=prompt_sizes(program(), TARGET))


def mixed(chunks: list[int], decoding: list[int]) -> Step:
    """Decodes with these contexts, then chunks of these lengths after 16 earlier tokens. Each request needs one row."""
    lens = np.array([*decoding, *(16 + count for count in chunks)], np.int32)
    counts = [1] * len(decoding) + chunks
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(end - n, end) for n, end in zip(counts, lens, strict=True)]).astype(np.int32)
    tables = np.arange(len(lens) * 5, dtype=np.int32).reshape(len(lens), 5)
    slots = tables[np.repeat(np.arange(len(lens)), counts), positions // 16] * 16 + positions % 16
    step = Step(
        input_ids=np.arange(3, 3 + starts[-1], dtype=np.int32),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        query_starts=starts,
        context_lens=lens,
        block_tables=tables,
        logit_rows=starts[1:] - 1,
        tree_masks=np.zeros(starts[-1], np.int64),
    )
    return step.for_groups([BLOCKS] * len(program().policies))


def bucket_of(step: Step) -> StepShape:
    shape = prompt_sizes(program(), TARGET).shape(step, 16)
    assert shape is not None
    return shape


def seen(executor: CudaExecutor, shape: StepShape, name: str, count: int) -> list[int]:
    """An input of the last step, as the device has it."""
    start = shape.input_offsets()[name]
    return executor._inputs[start : start + 4 * count].view(torch.int32).tolist()


def test_steps_of_a_bucket_replay_one_graph_with_their_own_inputs(made: tuple[CudaExecutor, FakeDriver]) -> None:
    executor, driver = made
    steps = [mixed([20, 9], [30, 5]), mixed([23, 6], [31, 6]), mixed([14], [33, 7, 8]), mixed([18, 1], [9, 12])]
    shape = bucket_of(steps[0])
    for number, step in enumerate(steps):
        assert bucket_of(step) == shape
        rows = len(step.logit_rows)
        executor._chosen[0, :rows] = torch.arange(rows) + number
        chosen = executor.choose(step, StepOutput.BEST, RowChoices.of([BEST] * rows))
        assert driver.taken() == expected(executor, program(), shape, StepOutput.BEST)
        assert chosen.tokens.tolist() == [number + row for row in range(rows)]
        assert driver.replays == number  # The first use has none.
        tokens, requests = len(step.input_ids), len(step.context_lens)
        assert seen(executor, shape, "input_ids", tokens) == step.input_ids.tolist()
        assert seen(executor, shape, "slot_mapping", tokens) == step.slot_mapping.tolist()
        rest = seen(executor, shape, "slot_mapping", shape.tokens)[tokens:]
        assert {slot // 16 for slot in rest} == {BLOCKS}
        assert seen(executor, shape, "query_starts", shape.requests + 1)[-1] == shape.tokens
        assert seen(executor, shape, "context_lens", requests) == step.context_lens.tolist()
    assert len(executor._graphs) == 1


def test_prompts_and_decodes_in_turn_leave_each_others_inputs_whole(made: tuple[CudaExecutor, FakeDriver]) -> None:
    executor, driver = made
    groups = len(program().policies)
    for number in range(4):
        executor.step(mixed([20 + number], [30]))
        step = decodes([30 + number, 5]).for_groups([BLOCKS] * groups)
        executor.step(step)
        shape = StepShape(2, 2, 2, 64, groups=groups)
        assert seen(executor, shape, "context_lens", 2) == [30 + number, 5]
        assert seen(executor, shape, "query_starts", 3) == [0, 1, 2]
    assert driver.replays == 6


def test_ways_of_choosing_have_graphs_of_their_own(made: tuple[CudaExecutor, FakeDriver]) -> None:
    executor, driver = made
    step = mixed([20], [30])
    shape, drawn = bucket_of(step), RowChoice(0.5, 2**31 - 1, 1.0, 0.0, 3, 4)
    for _ in range(3):
        for wanted, choice in ((StepOutput.BEST, BEST), (StepOutput.DRAWN, drawn)):
            executor.choose(step, wanted, RowChoices.of([choice] * 2))
            assert driver.taken() == expected(executor, program(), shape, wanted)
    assert len(executor._graphs) == 2 and driver.replays == 4


def test_other_steps_are_launched_one_by_one(
    made: tuple[CudaExecutor, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, driver = made
    groups = len(program().policies)
    for _ in range(3):
        full = mixed([3], [9] * 15)  # 16 requests: none is left for padding.
        executor.step(full)
        assert driver.taken() == expected(executor, program(), StepShape.of(full), StepOutput.LOGITS)
    assert driver.replays == 0
    plain, driver = fake_executor(program(), BLOCKS, monkeypatch)
    step = mixed([20], [30])
    for _ in range(3):
        plain.step(step)
        assert driver.taken() == expected(
            plain, program(), replace(StepShape.of(step), groups=groups), StepOutput.LOGITS
        )
    assert driver.replays == 0


def test_a_loop_with_divided_prompts_runs_graphs(made: tuple[CudaExecutor, FakeDriver]) -> None:
    executor, driver = made
    loop = StepLoop(executor, program().limits, BLOCKS, 24, program=program())
    requests, steps = [], 0
    for number in range(6):
        prompt = list(range(3, 43 + number))
        sampler = Sampler(SamplingParams(), np.array(prompt), program().vocab_size, np.zeros(0, np.int64))
        requests.append(Generation(prompt, sampler, Ending(frozenset(), frozenset(), 60), origin=Origin(salt=None)))
        loop.add(requests[-1])
    while not loop.scheduler.idle:
        loop.step()
        steps += 1
    assert [len(request.output) for request in requests] == [20 - number for number in range(6)]
    assert driver.replays == steps - len(executor._graphs._seen)
    assert any(kind.shape.tokens > kind.shape.requests for kind in executor._graphs._graphs)


def test_the_warm_up_captures_every_bucket_in_memory_of_the_padding(made: tuple[CudaExecutor, FakeDriver]) -> None:
    executor, driver = made
    assert isinstance(executor, WarmingExecutor)
    sizes = prompt_sizes(program(), TARGET)
    of_one_request = [tokens for tokens in sizes.tokens if tokens <= program().limits.max_model_len]
    per_way = len(request_buckets(program().limits)) + len(of_one_request)
    told = list(executor.warm_up())
    assert told[0] == (0, 3 * per_way) and told[-1] == (3 * per_way, 3 * per_way)
    assert len(executor._graphs) == driver.replays == 3 * per_way
    driver.taken()
    executor.choose(mixed([20], []), StepOutput.BEST, RowChoices.of([BEST]))
    groups = len(program().policies)
    executor.choose(decodes([9]).for_groups([BLOCKS] * groups), StepOutput.BEST, RowChoices.of([BEST]))
    assert driver.replays == 3 * per_way + 2


def test_steps_of_the_warm_up_have_no_place_of_a_request() -> None:
    sizes = PromptSizes((16, 40), (0, 1), (2,))
    blocks = (7, *(90 + group for group in range(len(program().policies))))
    steps = warm_up_steps(program(), blocks, 33, sizes, limit=99)
    assert {wanted for _, wanted, _ in steps} == {StepOutput.BEST, StepOutput.DRAWN, StepOutput.FILTERED}
    for step, _, choices in steps:
        assert choices is not None and len(choices.seeds) == len(step.logit_rows) == len(step.context_lens)
        for base, group, values in step.inputs_by_group():
            if base == "block_tables":
                assert (values == blocks[group]).all()
            if base == "slot_mapping":
                assert (values // 16 == blocks[group]).all()
        assert step.query_starts[-1] == len(step.input_ids)
    assert len(warm_up_steps(program(), blocks, 33, sizes, limit=5)) == 5
    short = replace(program(), limits=replace(program().limits, max_model_len=39))
    longest = {len(step.input_ids) for step, *_ in warm_up_steps(short, blocks, 33, sizes, limit=99)}
    assert 16 in longest and 40 not in longest, "no request has so many tokens"
    assert not warm_up_steps(replace(program(), caches=()), blocks, 33, sizes, limit=5)


def test_the_warm_up_ends_when_memory_is_short(
    made: tuple[CudaExecutor, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, _ = made
    room = iter([True] * 5 + [False] * 99)
    monkeypatch.setattr(executor, "_has_graph_room", lambda: next(room))
    told = list(executor.warm_up())
    assert told[-1][0] < told[-1][1]


def test_an_engine_warms_up_alone_and_tells(made: tuple[CudaExecutor, FakeDriver]) -> None:
    executor, _ = made
    loop = StepLoop(executor, program().limits, BLOCKS, program=program())
    engine: Any = SimpleNamespace(_executor=executor, _shared=SharedLoop(loop))
    told: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        told.append((done, total))
        with pytest.raises(RequestError, match="captures graphs"), engine._shared.serving([]):
            pass

    Engine.warm_up(engine, progress=note)
    assert told[-1][0] == told[-1][1] == len(told)
    engine._shared.claim()  # It is free again.
    other: Any = SimpleNamespace(_executor=object())
    Engine.warm_up(other)


def test_an_engine_without_graphs_shows_no_bar(
    made: tuple[CudaExecutor, FakeDriver], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executor, _ = made
    engine: Any = SimpleNamespace(
        _executor=executor, _shared=SharedLoop(StepLoop(executor, program().limits, BLOCKS, program=program()))
    )
    Engine.warm_up(engine, progress=True)
    assert "graphs" in capsys.readouterr().err
    monkeypatch.setattr(cuda, "warm_up_steps", lambda *given, **more: [])
    Engine.warm_up(engine, progress=True)
    assert not capsys.readouterr().err


def test_prompts_have_buckets_if_they_are_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = SimpleNamespace(name="NVIDIA H100 80GB HBM3", capability=(9, 0))
    opened = partial(cuda_opening.prompts_of, program(), device)
    for value, is_on in (("0", False), ("1", True)):
        monkeypatch.setenv("LLMC_PROMPT_GRAPHS", value)
        settings.cache_clear()
        assert (opened() is not None) == is_on
    device.capability, device.name = (99, 0), "unknown"
    assert opened() is None
    settings.cache_clear()
