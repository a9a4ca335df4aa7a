"""What a CudaExecutor hands to the driver, on a stand-in for the device: each launch with its own arguments, for every
shape, whether it is queued, timed or replayed by a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.frontends.capture import capture
from llmc.options import parse_options
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.program import ADAPTERS, Program, StepOutput, library_collectives, library_functions
from llmc.runtime.device.arguments import argument_values, extra_pointers, scratch_bytes
from llmc.runtime.device.device_place import DevicePlace
from llmc.runtime.device.inputs import StepShape, example_step
from llmc.runtime.device.library_only import library_only
from llmc.runtime.device.program import calls_of_step, plan_calls
from llmc.runtime.executors.cuda import CudaExecutor
from llmc.runtime.sampling.row_choice import BEST, RowChoice, RowChoices
from tests.codegen.tiny_models import gemma2
from tests.codegen.triton import test_rank_programs
from tests.gpu_target import gpu_target
from tests.runtime.device.decode_step import decodes
from tests.runtime.executors.fake_device import ARCH, STREAM, FakeDriver, Recorded, fake_executor, with_binaries
from tests.tiny_models import tiny_checkpoint

LIMITS = {"max_batch_tokens": 512, "max_logit_rows": 64, "max_model_len": 64, "max_sequences": 16}
BLOCKS = 300
MakeExecutor = Callable[[Program], tuple[CudaExecutor, FakeDriver]]


@cache
def of_windows() -> Program:
    """Of layers with and without windows."""
    return with_binaries(lower_device(gemma2(torch.bfloat16)[0], gpu_target("h100"), parse_options(LIMITS)).program)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A program with pools of adapters."""
    options = parse_options({**LIMITS, "enable_lora": True, "max_loras": 2, "max_lora_rank": 24})
    captured = capture(tiny_checkpoint("llama", tmp_path_factory.mktemp("model")), options)
    graph = run_pipeline(captured.graph, default(), options).graph
    return with_binaries(lower_device(graph, gpu_target("h100"), options).program)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeExecutor:
    return lambda program: fake_executor(program, BLOCKS, monkeypatch)


def expected(
    executor: CudaExecutor, program: Program, shape: StepShape, wanted: StepOutput, sides: tuple[str, ...] = ()
) -> list[Recorded]:
    """What each launch of a step should be, computed one by one."""
    launches = []
    for call, grid in calls_of_step(plan_calls(program), shape.counts(), wanted, sides):
        if not call.kernel.is_library:
            binary = call.kernel.binaries[ARCH]
            scratch = executor._scratch_address(scratch_bytes(binary, grid), binary.scratch_alignment)
            extra = extra_pointers(binary, scratch)
            values = argument_values(call, shape, executor._address_in(shape), extra)
            launches.append(Recorded(binary.file, grid, STREAM, tuple(values)))
    return launches


SHAPES = [(1, 1, 1, 64), (4, 1, 1, 16), (8, 8, 8, 64), (40, 3, 2, 16), (129, 1, 1, 16), (512, 16, 16, 16)]


@pytest.mark.parametrize("counts", SHAPES)
def test_steps_launch_what_each_call_says(make: MakeExecutor, counts: tuple[int, int, int, int]) -> None:
    program = of_windows()
    executor, driver = make(program)
    shape = StepShape(*counts, groups=len(program.policies))
    step = example_step(shape, program.limits, BLOCKS)
    given = {
        StepOutput.BEST: RowChoices.of([BEST] * counts[1]),
        StepOutput.DRAWN: RowChoices.of([RowChoice(0.5, 2**31 - 1, 1.0, 0.0, 3, 4)] * counts[1]),
        StepOutput.FILTERED: RowChoices.of([RowChoice(0.5, 7, 0.9, 0.0, 3, 4)] * counts[1]),
    }
    for wanted in (*given, StepOutput.LOGITS):
        if wanted is StepOutput.LOGITS:
            executor.step(step)
        else:
            executor.choose(step, wanted, given[wanted])
        launched = driver.taken()
        assert launched and launched == expected(executor, program, shape, wanted)


def test_a_graph_replays_the_launches_of_its_bucket(make: MakeExecutor) -> None:
    program = of_windows()
    executor, driver = make(program)
    step = decodes([30, 5, 60]).for_groups([BLOCKS] * len(program.policies))
    step = replace(step, block_tables=step.block_tables % BLOCKS)
    bucket = StepShape(4, 4, 4, 64, groups=len(program.policies))
    choices = RowChoices.of([BEST] * 3)
    for _ in range(4):
        executor.choose(step, StepOutput.BEST, choices)
        assert driver.taken() == expected(executor, program, bucket, StepOutput.BEST)
        # A prompt in between leaves its values in the table.
        executor.step(example_step(StepShape(33, 1, 1, 16), program.limits, BLOCKS))
        driver.taken()
    assert len(executor._graphs) == 1


def test_graphs_take_the_inputs_of_their_step_and_bring_its_tokens_back(make: MakeExecutor) -> None:
    executor, _ = make(of_windows())
    groups = len(of_windows().policies)
    drawn = RowChoice(0.5, 2**31 - 1, 1.0, 0.0, 3, 4)
    for number, rows in enumerate([[BEST] * 3, [BEST, drawn, BEST], [drawn] * 3] * 4):
        contexts = [10 + number, 3, 7 + number]
        step = decodes(contexts).for_groups([BLOCKS] * groups)
        step = replace(step, input_ids=step.input_ids + number)
        executor._chosen[0, :3] = torch.arange(3) + number
        executor._chosen[1, :3] = torch.tensor([0.5, 1.5, 2.5]).view(torch.int32)
        choices = RowChoices.of(rows)
        chosen = executor.choose(step, StepOutput.DRAWN if drawn in rows else StepOutput.BEST, choices)
        assert chosen.tokens.tolist() == [number, 1 + number, 2 + number]
        assert chosen.scores.tolist() == [0.5, 1.5, 2.5] and chosen.covered.all()
        offsets = StepShape(4, 4, 4, 64, groups=groups).input_offsets()
        for name, values, padding in (
            ("input_ids", step.input_ids, 0),
            ("context_lens", contexts, 1),
            ("temperature", [choice.temperature for choice in rows], 0),
        ):
            start = offsets[name]
            dtype = torch.float32 if name == "temperature" else torch.int32
            assert executor._inputs[start : start + 16].view(dtype).tolist() == [*values, padding]
        if number % 5 == 4:  # Steps that overwrite what is staged.
            executor.step(example_step(StepShape(33, 1, 1, 16, groups=groups), of_windows().limits, BLOCKS))
    assert len(executor._graphs) == 2


def test_adapters_have_launches_of_their_own(make: MakeExecutor, adapted: Program) -> None:
    executor, driver = make(adapted)
    step = decodes([9, 4])
    shape = StepShape(2, 2, 2, 64, adapters=True)
    executor.step(step)
    without = driver.taken()
    assert without == expected(executor, adapted, shape, StepOutput.LOGITS)
    of = np.array([1, 0], np.int32)
    executor.step(replace(step, adapter_of_token=of, adapter_of_logit_row=of))
    launched = driver.taken()
    assert launched == expected(executor, adapted, shape, StepOutput.LOGITS, (ADAPTERS,))
    assert len(launched) > len(without)


def test_timed_steps_launch_the_same(make: MakeExecutor) -> None:
    program = of_windows()
    executor, driver = make(program)
    shape = StepShape(40, 3, 2, 16, groups=len(program.policies))
    times = executor.step_timed(example_step(shape, program.limits, BLOCKS))
    assert driver.taken() == expected(executor, program, shape, StepOutput.LOGITS)
    present = calls_of_step(plan_calls(program), shape.counts(), StepOutput.LOGITS)
    assert [time.launch for time in times] == [call.index for call, _ in present]


def queues_nothing(function: Callable[..., None]) -> Callable[..., None]:
    """A function with the same parameters that does nothing."""

    @wraps(function)
    def stub(**arguments: Any) -> None:
        pass

    return stub


@pytest.mark.parametrize("has_memory", [True, False])
def test_ranks_that_have_met_use_their_table(
    make: MakeExecutor, has_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives = {name: queues_nothing(function) for name, function in library_collectives.FUNCTIONS.items()}
    functions = {**library_functions.FUNCTIONS, **collectives}
    program = with_binaries(test_rank_programs.lowered(8, channels=256, layers=1).program)
    executor, driver = make(program)
    monkeypatch.setattr(library_functions, "FUNCTIONS", functions)
    table = torch.arange(9)
    executor.join(DevicePlace(table, has_memory, lambda: None, lambda: None, None))
    shape = StepShape(40, 3, 2, 256)
    executor.follow(example_step(shape, program.limits, BLOCKS))
    launched = driver.taken()
    monkeypatch.undo()
    used = program if has_memory else library_only(program)
    assert launched == expected(executor, used, shape, StepOutput.LOGITS)
    place = table.data_ptr().to_bytes(8, "little")
    assert any(place in launch.values for launch in launched)


def test_graphs_of_ranks_that_meet_again_use_the_new_table(make: MakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, driver = make(with_binaries(test_rank_programs.lowered(8, channels=256, layers=1).program))
    collectives = {name: queues_nothing(function) for name, function in library_collectives.FUNCTIONS.items()}
    monkeypatch.setattr(library_functions, "FUNCTIONS", {**library_functions.FUNCTIONS, **collectives})
    tables = [torch.arange(9), torch.arange(9) + 100]
    own, other = (table.data_ptr().to_bytes(8, "little") for table in tables)
    choices = RowChoices.of([BEST] * 2)
    for table, wanted, unwanted in zip(tables, (own, other), (other, own), strict=True):
        executor.join(DevicePlace(table, True, lambda: None, lambda: None, None))
        for _ in range(3):
            executor.choose(decodes([30, 5]), StepOutput.BEST, choices)
            launched = driver.taken()
            assert any(wanted in launch.values for launch in launched)
            assert not any(unwanted in launch.values for launch in launched)
        assert len(executor._graphs) == 1


def test_another_binary_is_launched_with_the_arguments_of_the_call(make: MakeExecutor) -> None:
    program = of_windows()
    executor, driver = make(program)
    shape = StepShape(40, 3, 2, 16, groups=len(program.policies))
    executor._scratch_address(1 << 20)  # Enough for all, so that it stays where it is.
    wanted = expected(executor, program, shape, StepOutput.LOGITS)
    kernels = [(c, g) for c, g in executor.launches(shape) if not c.kernel.is_library]
    for (call, grid), launch in zip(kernels, wanted, strict=True):
        other = replace(call.kernel.binaries[ARCH], file="other")
        driver.counts["other"] = len(launch.values)
        executor.bound(call, grid, shape, driver.load(other, Path()))(STREAM)
        assert driver.taken() == [replace(launch, file="other")]


def test_closing_frees_the_memory(make: MakeExecutor) -> None:
    executor, _ = make(of_windows())
    executor.step(decodes([3]).for_groups([BLOCKS] * len(of_windows().policies)))
    executor.close()
    assert not {"_launches", "_tensors", "_inputs"} & vars(executor).keys()
