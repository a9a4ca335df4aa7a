"""Figures of machine code are those of kernels whose code is known."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.machine_code.budget import EVERY_KERNEL, Budget, Limit
from llmc.codegen.triton.machine_code.control_flow import control_flow
from llmc.codegen.triton.machine_code.device_limits import blocks_per_sm, bytes_to_keep_in_flight, issue_rate
from llmc.codegen.triton.machine_code.disassembly import Instruction, disassemble
from llmc.codegen.triton.machine_code.figures import KernelCode, kernel_code
from llmc.codegen.triton.machine_code.findings import check_budget
from llmc.codegen.triton.machine_code.pointers import parameter_offsets
from llmc.errors import ToolchainError
from llmc.program import DeviceKernel, DeviceParameter
from tests.codegen.triton.machine_code import waiting_kernel
from tests.gpu_target import gpu_target

_POINTERS = ("x_ptr", "weight_ptr", "y_ptr")


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (["FMUL R1,R2,R3", "FADD R4,R4,R1"], 1),
        (["FMUL R1,R2,R3", "FADD R4,R4,R1", "FADD R5,R5,R1", "FMUL R1,R2,R3"], 2),
        (["FMUL R1,R2,R3", "FADD R4,R4,R1", "FMNMX R5,R1,R6"], 0),
        (["FMUL R1,R2,R3", "MUFU R1,R1", "FADD R4,R4,R1"], 0),
        (["FFMA R4,R2,R3,R4", "FADD R4,R4,R1"], 0),
    ],
)
def test_a_product_that_only_sums_read_could_be_fused(
    lines: list[str], count: int, workers: Workers, tmp_path: Path
) -> None:
    code = _compiled("waiting_kernel", {"TURNS": 64, "STORES_FIRST": False}, workers, tmp_path)
    parts = [line.split() for line in lines]
    loop = tuple(
        Instruction(i, name, (), operands, None, 1, None, frozenset()) for i, (name, operands) in enumerate(parts)
    )
    vars(code)["main_loop"] = loop
    assert code.unfused_multiplies == count


def _compiled(
    function: str, constants: dict[str, int | bool], workers: Workers, directory: Path, counts: tuple[str, ...] = ()
) -> KernelCode:
    pointers = tuple(DeviceParameter(name, "*bf16", True) for name in _POINTERS)
    numbers = tuple(DeviceParameter(name, "i32", False) for name in counts)
    source = waiting_kernel.__file__
    kernel = DeviceKernel(function, source, function, pointers + numbers, {**constants}, num_warps=4, num_stages=3)
    (directory / "kernels").mkdir(exist_ok=True)
    binary = workers.compile(kernel, gpu_target("h100"), directory).binary
    return kernel_code(kernel, binary, directory / binary.file, gpu_target("h100"), ("weight_ptr",))


def test_a_kernel_that_waits(workers: Workers, tmp_path: Path) -> None:
    code = _compiled("waiting_kernel", {"TURNS": 64, "STORES_FIRST": False}, workers, tmp_path)
    assert code.exits_before_wait == code.stores_before_wait == 0
    assert code.releases_dependents_first
    assert code.stream_loads_before_wait == 1  # 8 elements a thread: 16 bytes.
    loads = code.stream_loads(code.main_loop)
    assert loads and all(load.width == 16 for load in loads), "x is read behind the loop"
    assert code.narrow_loads == 0
    assert code.instructions_per_byte == len(code.main_loop) / (16 * len(loads))
    assert 16 * 128 * code.blocks_per_sm <= code.bytes_in_flight <= 16 * 128 * code.blocks_per_sm * len(loads)
    assert code.unfused_multiplies == code.shared_accesses == code.barriers == code.matrix_instructions == 0


def test_a_store_before_the_wait(workers: Workers, tmp_path: Path) -> None:
    code = _compiled("waiting_kernel", {"TURNS": 4, "STORES_FIRST": True}, workers, tmp_path)
    assert code.stores_before_wait == 1
    assert code.exits_before_wait == 0


def test_a_way_out_before_the_wait(workers: Workers, tmp_path: Path) -> None:
    code = _compiled("leaving_kernel", {}, workers, tmp_path, ("count",))
    assert code.exits_before_wait == 1
    assert code.stores_before_wait == 0


def test_findings_say_what_a_miss_costs(workers: Workers, tmp_path: Path) -> None:
    code = _compiled("leaving_kernel", {}, workers, tmp_path, ("count",))
    limits = (
        Limit("bytes_in_flight", "for the test", at_least=1e9),
        Limit("instructions_per_byte", "for the test", at_most=0.0, arches=(90,)),
        Limit("instructions_per_byte", "of another GPU", at_most=0.0, arches=(80,)),
        Limit("registers_of_nobody", "of another GPU", at_most=0.0, arches=(80,)),
    )
    findings = check_budget(code, Budget("leaving_kernel", limits, ("weight_ptr",)))
    assert [finding.limit for finding in findings] == [*EVERY_KERNEL, *limits[:2]]
    costs = {finding.limit.figure: finding.seconds(code, 1e9) for finding in findings if not finding.is_met}
    target = gpu_target("h100")
    assert costs["exits_before_wait"] == target.launch
    assert code.instructions_per_byte is not None
    issued = code.instructions_per_byte * 1e9 / 32 / issue_rate(target)
    assert costs["instructions_per_byte"] == pytest.approx(max(0.0, issued - 1e9 / target.bandwidth))
    arriving = code.bytes_in_flight / bytes_to_keep_in_flight(target) * target.bandwidth
    assert costs["bytes_in_flight"] == pytest.approx(max(0.0, 1e9 / arriving - 1e9 / target.bandwidth), rel=1e-3)


def _written(*lines: str) -> list[Instruction]:
    """Instructions from lines such as `@P0 BRA 0x10`."""
    instructions = []
    for number, line in enumerate(lines):
        predicate, rest = line.split(" ", 1) if line.startswith("@") else (None, line)
        opcode, _, operands = rest.partition(" ")
        name, *modifiers = opcode.split(".")
        instructions.append(Instruction(16 * number, name, tuple(modifiers), operands, predicate, 1, None, frozenset()))
    return instructions


def test_innermost_loops_leave_out_spins_and_outer_loops() -> None:
    flow = control_flow(
        _written(
            "MOV R0,0x0",
            "LDG.E R1,[R2.64]",  # 0x10: the outer loop
            "SYNCS.PHASECHK P0,[UR4]",  # 0x20: a spin
            "@!P0 BRA 0x20",
            "FFMA R3,R1,R1,R3",  # 0x40: the inner loop
            "@P1 BRA 0x40",
            "@P2 BRA 0x10",
            "EXIT",
            "BRA 0x80",
        )
    )
    assert [[instruction.name for instruction in loop.instructions] for loop in flow.innermost_loops()] == [
        ["FFMA", "BRA"]
    ]


def test_code_behind_an_indexed_jump_is_reached_through_it() -> None:
    """Warps that copy and warps that multiply: the disassembler does not say where they begin."""
    flow = control_flow(
        _written(
            "ACQBULK",
            "@P0 BRA 0x40",
            "BRX R4,-0xa0",
            "NOP",
            "EXIT",  # 0x40
            "HGMMA R24,gdesc[UR4],R24",  # 0x50: a loop that only the indexed jump leads to
            "@P1 BRA 0x50",
            "EXIT",
        )
    )
    assert [[instruction.name for instruction in loop.instructions] for loop in flow.innermost_loops()] == [
        ["HGMMA", "BRA"]
    ]
    wait, last = flow.blocks[0][0], flow.blocks[0x70][0]
    assert last.name == "EXIT" and flow.dominating(wait, last)


def test_waits_of_groups_of_warps(workers: Workers, tmp_path: Path) -> None:
    """A barrier for some of a block's threads names their number; exponentials behind the last wait are exposed."""
    code = _compiled("waiting_kernel", {"TURNS": 64, "STORES_FIRST": False}, workers, tmp_path)
    vars(code)["main_loop"] = _written(
        "HGMMA R24,gdesc[UR4],R24",
        "WARPGROUP.DEPBAR.LE gsb0,0x1",
        "MUFU.EX2 R1,R1",
        "BAR.SYNC.DEFER_BLOCKING 0x0,0x80",
        "WARPGROUP.DEPBAR.LE gsb0,0x0",
        "MUFU.EX2 R2,R2",
        "WARPGROUP.ARRIVE ",
        "BAR.SYNC.DEFER_BLOCKING 0x0",
    )
    assert code.exposed_exponentials == 1
    assert code.barriers == 1


def test_dominating_instructions() -> None:
    code = _written("@P0 BRA 0x30", "ACQBULK", "EXIT", "STG.E [R0.64],R1", "EXIT")
    flow = control_flow(code)
    _, wait, behind, store, exit_without = code
    assert flow.dominating(wait, behind)
    assert not flow.dominating(wait, store)
    assert not flow.dominating(wait, exit_without)


def test_where_parameters_are() -> None:
    parameters = [
        DeviceParameter("x_ptr", "*bf16", True),
        DeviceParameter("tokens", "i32", False),
        DeviceParameter("y_ptr", "*bf16", True),
    ]
    assert parameter_offsets(parameters) == {0: "x_ptr", 4: "x_ptr", 16: "y_ptr", 20: "y_ptr"}


def test_blocks_of_a_multiprocessor() -> None:
    h100 = gpu_target("h100")
    assert blocks_per_sm(h100, threads=128, registers=72, shared_bytes=0) == 7  # 65,536 / (72 · 128)
    assert blocks_per_sm(h100, threads=128, registers=16, shared_bytes=0) == 16  # 64 warps
    assert blocks_per_sm(h100, threads=32, registers=16, shared_bytes=0) == 32
    assert blocks_per_sm(h100, threads=128, registers=32, shared_bytes=100 * 1024) == 2


def test_a_cubin_that_is_damaged(tmp_path: Path, workers: Workers) -> None:
    code = _compiled("leaving_kernel", {}, workers, tmp_path, ("count",))
    file = tmp_path / code.binary.file
    with pytest.raises(ToolchainError, match="no kernel other_kernel, only leaving_kernel"):
        disassemble(file, "other_kernel")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ToolchainError, match="nvdisasm cannot read the cubin"):
        disassemble(file, "leaving_kernel")


def test_control_codes_are_those_of_the_printed_encoding(tmp_path: Path, workers: Workers) -> None:
    from triton import knobs

    code = _compiled("leaving_kernel", {}, workers, tmp_path, ("count",))
    command = [knobs.nvidia.cuobjdump.path, "-sass", str(tmp_path / code.binary.file)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    words = [int(line.split("/* 0x")[1][:16], 16) for line in text.splitlines() if line.strip().startswith("/* 0x")]
    assert [word >> 41 & 15 for word in words] == [instruction.stall for instruction in code.code.instructions]
    assert any(instruction.waits for instruction in code.code.instructions)
    assert any(instruction.write_scoreboard is not None for instruction in code.code.instructions)


def test_a_figure_that_the_code_does_not_show(workers: Workers, tmp_path: Path) -> None:
    code = _compiled("leaving_kernel", {}, workers, tmp_path, ("count",))
    nothing = replace(code, streams=("absent_ptr",))
    finding = next(
        candidate
        for candidate in check_budget(
            nothing, Budget("leaving_kernel", (Limit("instructions_per_byte", "x", at_most=3),))
        )
        if candidate.limit.figure == "instructions_per_byte"
    )
    assert finding.value is None and not finding.is_met and finding.seconds(nothing, 1.0) is None
    assert finding.limit.text(code.target) == "≤ 3"
