"""GPU programs that were edited: refused before the first launch, or every launch begins within the device's memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.engine_format.program_check import check_program
from llmc.errors import EngineFormatError, LlmcError
from llmc.files.typed_json import to_json
from llmc.options import BuildOptions
from llmc.program import CHOICE_INPUTS, CHOICE_OUTPUTS, AdapterPools, Launch, Program, StepOutput
from llmc.program.adapter_pools import AdaptedProduct
from llmc.program.launch_arguments import Operand
from llmc.program.program_json import program_from_json
from llmc.runtime.device.arguments import argument_values
from llmc.runtime.device.inputs import StepShape, largest_shape
from llmc.runtime.device.memory import plan_device_memory
from llmc.runtime.device.program import calls_of_step, plan_calls
from tests.codegen.tiny_models import GraphBuilder, ops
from tests.engine_format.edited_programs import edited
from tests.gpu_target import gpu_target
from tests.runtime.device.device_program import program as made_up

AT = Path("program.json")
# A base for each memory, far from all others.
APART = 1 << 50


@pytest.fixture(scope="module")
def text() -> str:
    """The program of a model with products, a norm and all ways to choose tokens, for an H100."""
    b = GraphBuilder(torch.bfloat16)
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("embed", 64, 128))
    normed = b.call(ops.rms_norm.default, x, b.weight("norm", 128), 1e-5)
    y = b.call(ops.fused_linear.default, normed, b.weight("w", 128, 128), None, x, "identity", 0.5)
    rows = b.call(ops.select_rows.default, y, b.inputs["logit_rows"])
    graph, _ = b.finish(b.call(ops.lm_head.default, rows, b.weight("head", 64, 128)))
    options = BuildOptions(max_model_len=64, max_batch_tokens=64, max_sequences=8, max_logit_rows=16)
    return json.dumps(to_json(lower_device(graph, gpu_target("h100"), options).program))


def sizes(program: Program) -> dict[tuple[str, str], int]:
    """Bytes of each memory that pointers lead into, as the executor allocates them."""
    limits = program.limits
    memory = plan_device_memory(program, 1 << 60, None)
    found = {("arena", ""): memory.arena, ("output", "logits"): memory.logits}
    found |= {("output", name): limits.max_logit_rows * 4 for name in CHOICE_OUTPUTS}
    found |= {("weight", slot.name): slot.nbytes for slot in program.weights}
    for index, cache in enumerate(program.caches):
        for part, nbytes in zip("kv", cache.key_and_value_bytes(limits.block_size), strict=True):
            found["cache", f"{index}.{part}"] = nbytes
    return found


def check_launches(program: Program) -> None:
    """What the driver would be given, for the smallest step and the largest."""
    calls, memories, largest = plan_calls(program), sizes(program), largest_shape(program.limits)
    bases = {key: (number + 1) * APART for number, key in enumerate(memories)}
    inputs = (len(bases) + 1) * APART
    for shape in (StepShape(1, 1, 1, 1), largest):
        offsets = shape.input_offsets()

        def address(space: str, name: str, offsets: Any = offsets) -> int:
            return inputs + offsets[name] if space == "input" else bases[space, name]

        for wanted in (StepOutput.LOGITS, StepOutput.FILTERED):
            end = offsets["end"] if wanted is not StepOutput.LOGITS else offsets[next(iter(CHOICE_INPUTS))]
            bounds = {inputs: end} | {base: memories[key] for key, base in bases.items()}
            for call, grid in calls_of_step(calls, shape.counts(), wanted):
                assert grid[0] < 2**31 and max(grid[1:]) < 2**16
                values = argument_values(call, shape, address, [])
                for parameter, value in zip(call.kernel.parameters, values, strict=True):
                    if parameter.type.startswith("*"):
                        place = int.from_bytes(value, "little")
                        base = place // APART * APART
                        assert place - base < bounds[base], (call.kernel.name, parameter.name)
                        assert not parameter.divisible or place % 16 == 0


def check_edits(text: str, count: int) -> None:
    refused = 0
    for seed in range(count):
        changed, what = edited(json.loads(text), random.Random(seed))
        try:
            program = program_from_json(json.dumps(changed), AT)
            check_program(program, AT)
            plan_calls(program)
            sizes(program)  # A weight of more bytes than any device has is refused, too.
        except LlmcError:
            refused += 1
            continue
        try:
            check_launches(program)
        except BaseException as error:
            raise AssertionError(f"edit {seed}: {what}") from error
    assert 0.4 * count < refused < count


def test_edited_programs(text: str) -> None:
    check_launches(program_from_json(text, AT))
    check_edits(text, 80)


@pytest.mark.slow
def test_many_more_edited_programs(text: str) -> None:
    check_edits(text, 5000)


def with_argument(name: str, value: Any) -> Callable[[Launch], Launch]:
    return lambda launch: replace(launch, arguments={**launch.arguments, name: value})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            with_argument("x_ptr", Operand("buffer", "x", 32768)),
            "begins a row at element 32768 of buffer:x.32768, which has 32768",
        ),
        (with_argument("w_ptr", Operand("weight", "w", 64000)), "begins a row at element 64000 of weight:w"),
        (with_argument("k_ptr", Operand("cache", "0.k", 2048)), "begins a row at element 2048 of cache:0.k"),
        (with_argument("ids_ptr", Operand("input", "positions", 1)), "begins a row at element 1 of input:positions"),
        (with_argument("ids_ptr", Operand("input", "nothing")), "names input:nothing, which the program does not have"),
        (with_argument("ids_ptr", Operand("input", "seeds")), "reads input:seeds in steps that choose no tokens"),
        (with_argument("y_ptr", Operand("output", "nothing")), "names output:nothing, which the program does not have"),
        (with_argument("y_ptr", Operand("buffer", "x")), "as y_ptr, which is .bf16 and not .fp32"),
        (with_argument("n", "R2"), "passes 'R2' as n, which is not a count of a step"),
        (with_argument("n", 1 << 40), "as n, which is i64 and not i32"),
        (with_argument("big", 1 << 64), "as big, which is not a 64-bit number"),
        (with_argument("scale", 1e39), "as scale, which is not an fp32 number"),
        (with_argument("scale", True), "passes True as scale"),
        (with_argument("more", 1), "has the arguments .*more, the kernel takes"),
        (lambda launch: replace(launch, grid=("T", "T * 128")), "has 65536 programs in one direction"),
        (lambda launch: replace(launch, grid=("T", "cdiv(T, L - 1)")), "cdiv by 0"),
        (lambda launch: replace(launch, kernel="absent"), "the kernel 'absent', which does not exist"),
    ],
)
def test_a_launch_that_does_not_fit(change: Callable[[Launch], Launch], problem: str) -> None:
    program = made_up("sm_90")
    check_launches(program)
    with pytest.raises(EngineFormatError, match=problem):
        plan_calls(replace(program, launches=tuple(map(change, program.launches))))


def test_strides_and_multiples() -> None:
    program = made_up("sm_90")
    (kernel,), (launch,) = program.kernels, program.launches
    (*before, stride) = [p for p in kernel.parameters if p.name != "stride"] + [
        replace(p, name="x_row_stride") for p in kernel.parameters if p.name == "stride"
    ]
    kernel = replace(kernel, parameters=(*before, replace(stride, divisible=True)))

    def strided(value: int) -> Program:
        arguments = {name: given for name, given in launch.arguments.items() if name != "stride"}
        changed = replace(launch, arguments={**arguments, "x_ptr": Operand("buffer", "x"), "x_row_stride": value})
        return replace(program, kernels=(kernel,), launches=(changed,))

    assert plan_calls(strided(64))
    for value, problem in ((80, "begins a row at element 40880"), (-16, "goes back by 16"), (40, "multiples of 16")):
        with pytest.raises(EngineFormatError, match=problem):
            plan_calls(strided(value))


def test_kernels_that_cannot_be() -> None:
    program = made_up("sm_90")
    (kernel,) = program.kernels
    binary = kernel.binaries["sm_90"]
    for changed, problem in (
        ((kernel, kernel), "appears twice"),
        ((replace(kernel, constants={"n": 1}),), "two parameters of one name"),
        ((replace(kernel, source="library", function="system"),), "not a function of llmc's library"),
        ((replace(kernel, binaries={"sm_90": replace(binary, threads=0)}),), "cannot be launched"),
        ((replace(kernel, binaries={"sm_90": replace(binary, scratch_alignment=3)}),), "cannot be launched"),
    ):
        with pytest.raises(EngineFormatError, match=problem):
            plan_calls(replace(program, kernels=changed))
    (buffer,) = program.buffers
    askew = replace(buffer, offset=replace(buffer.offset, tokens=130))
    with pytest.raises(EngineFormatError, match="multiple of 16 bytes"):
        plan_calls(replace(program, buffers=(askew,)))


def test_dtypes_that_no_kernel_takes() -> None:
    program = made_up("sm_90")
    (buffer,), (slot,) = program.buffers, program.weights
    for changed, problem in (
        (replace(program, buffers=(replace(buffer, dtype="F64"),)), "names buffer:x.8/64, which is F64"),
        (replace(program, weights=(replace(slot, dtype="I16"),)), "names weight:w, which is I16"),
    ):
        check_program(replace(changed, arena=replace(program.arena, tokens=1 << 20)), AT)
        with pytest.raises(EngineFormatError, match=problem):
            plan_calls(changed)


def test_adapters_that_cannot_be() -> None:
    program, product = made_up("sm_90"), AdaptedProduct("w", 64, 1000, "BF16", ())
    pools = AdapterPools(2, 4, (product,))
    check_program(replace(program, adapters=pools), AT)
    for changed, problem in (
        (replace(pools, slots=-1), "adapters have slots=-1"),
        (replace(pools, max_rank=1 << 40), "adapters have max_rank=1099511627776"),
        (replace(pools, products=(replace(product, dtype="F7"),)), "adapters of 'w' have the dtype 'F7'"),
        (replace(pools, products=(replace(product, columns=0),)), "adapters of 'w' have columns=0"),
    ):
        with pytest.raises(EngineFormatError, match=problem):
            check_program(replace(program, adapters=changed), AT)
