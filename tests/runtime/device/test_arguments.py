"""Launch arguments as the driver reads them, and the pointers that Triton adds."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import replace

import pytest

from llmc.program import RowCount, RowRange, StepOutput
from llmc.program.launch_grid import evaluate_grid
from llmc.runtime.device import program as device_program
from llmc.runtime.device.arguments import PackedArguments, argument_values, extra_pointers, scratch_bytes
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.program import calls_of_step, plan_calls
from tests.runtime.device.device_program import binary, program

SHAPE = StepShape(tokens=20, logit_rows=3, requests=5, max_blocks=64)
BASES = {("arena", ""): 1 << 44, ("weight", "w"): 2 << 44, ("cache", "0.k"): 3 << 44, ("output", "logits"): 4 << 44}


def address(space: str, name: str) -> int:
    return SHAPE.input_offsets()[name] if space == "input" else BASES[space, name]


def test_values_stand_where_the_pointers_point() -> None:
    (call,) = plan_calls(program("sm_90"))
    packed = PackedArguments(argument_values(call, SHAPE, address, [77]))
    count = len(call.kernel.parameters) + 1
    pointers = (ctypes.c_uint64 * count).from_address(packed.address)
    raw = [ctypes.string_at(pointer, 8) for pointer in pointers]
    as_ints = [struct.unpack("<q", value)[0] for value in raw]
    buffer_x = (1 << 44) + 64 + 8 * 2 + 128 * 20 + 16 * 3
    positions = SHAPE.input_offsets()["positions"]
    assert as_ints[:5] == [buffer_x, 2 << 44, 3 << 44, positions, 4 << 44]
    assert struct.unpack("<i", raw[5][:4]) == (20,)
    assert struct.unpack("<i", raw[6][:4]) == (-3,)
    assert as_ints[7] == 2**40
    assert struct.unpack("<f", raw[8][:4]) == (0.5,)
    assert as_ints[9] == 77


def test_grids_follow_the_counts() -> None:
    (call,) = plan_calls(program("sm_90"))
    assert call.programs(SHAPE.counts()) == (3, 5, 1)


def test_a_step_has_the_calls_of_its_rows_with_grids_that_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def evaluated(text: str, counts: Mapping[str, int]) -> int:
        read.append(text)
        return evaluate_grid(text, counts)

    (call,) = plan_calls(program("sm_90"))
    few = replace(call, only=RowRange(RowCount.TOKENS, 1, 4))
    many = replace(call, only=RowRange(RowCount.TOKENS, 5, None))
    empty = replace(call, grid=("T - 20", "R"))
    best = replace(call, wanted=(StepOutput.BEST,))
    monkeypatch.setattr(device_program, "evaluate_grid", evaluated)
    calls = calls_of_step([call, few, many, empty, best], SHAPE.counts(), StepOutput.LOGITS)
    assert calls == [(call, (3, 5, 1)), (many, (3, 5, 1))]
    assert read == ["cdiv(T, 8)", "R", "T - 20", "R"]


def test_only_the_first_extra_pointer_leads_to_scratch_memory() -> None:
    """Triton 3.6 and 3.9 append a pointer to global scratch memory and one to the profiler's."""
    assert extra_pointers(binary("sm_90", extra_pointers=2), 640) == [0, 0]
    assert extra_pointers(binary("sm_90", extra_pointers=2, scratch_bytes=100), 640) == [640, 0]
    assert extra_pointers(binary("sm_90"), 640) == []


def test_scratch_memory_is_for_all_blocks_and_aligned() -> None:
    assert scratch_bytes(binary("sm_90", extra_pointers=1, scratch_bytes=100), (3, 5, 1)) == 15 * 128 + 128
    assert scratch_bytes(binary("sm_90", extra_pointers=1), (3, 5, 1)) == 0
