"""Disassemble a cubin into instructions with their control codes, with the disassembler of Triton's wheel."""

import json
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import ToolchainError

_INSTRUCTION_BYTES = 16
_NUMBERED = re.compile(r"\b(U?R)(\d+)\b")
# A field of three bits that names no scoreboard.
_NO_SCOREBOARD = 7


@dataclass(frozen=True)
class Register:
    """A 32-bit register. is_uniform: whether the threads of a warp share it."""

    number: int
    is_uniform: bool = False


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction.

    Attributes:
        address: Byte offset in the function.
        name: First part of the opcode, such as `LDG`.
        modifiers: The other parts, such as `("E", "128")`.
        operands: As nvdisasm prints them, in one string.
        predicate: Such as `@!P0`; None if the instruction always runs.
        stall: Cycles before the warp issues its next instruction, at least.
        write_scoreboard: Scoreboard that is released when the result is written; None if there is none.
        waits: Scoreboards that must be free before the instruction issues.
    """

    address: int
    name: str
    modifiers: tuple[str, ...]
    operands: str
    predicate: str | None
    stall: int
    write_scoreboard: int | None
    waits: frozenset[int]

    @property
    def registers(self) -> tuple[Register, ...]:
        """Registers among the operands, in order."""
        return tuple(Register(int(number), kind == "UR") for kind, number in _NUMBERED.findall(self.operands))

    @property
    def width(self) -> int:
        """Bytes that a memory instruction moves for each thread."""
        for modifier in self.modifiers:
            if modifier in _WIDTHS:
                return _WIDTHS[modifier]
        return 4


_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, "256": 32}


@dataclass(frozen=True)
class MachineCode:
    """The instructions of one kernel. arch: compute capability, such as 90."""

    arch: int
    instructions: tuple[Instruction, ...]


def disassemble(binary: Path, entry: str) -> MachineCode:
    """Disassemble one kernel of a cubin.

    Args:
        binary: The cubin.
        entry: Name of the kernel.

    Returns:
        Instructions in the order of their addresses.

    Raises:
        ToolchainError: Triton is missing, or its nvdisasm fails on the file or has no such kernel.
    """
    version, functions = json.loads(_nvdisasm(binary))
    function = next((record for record in functions if record["function-name"] == entry), None)
    if function is None:
        names = ", ".join(record["function-name"] for record in functions)
        raise ToolchainError(
            f"the cubin has no kernel {entry}, only {names or 'none'}",
            at=binary,
            fix="build the engine again: llmc build MODEL --target TARGET -o OUT --force",
        )
    words = _control_words(binary, entry, function["start"], len(function["sass-instructions"]))
    instructions = tuple(
        _instruction(number * _INSTRUCTION_BYTES, record, word)
        for number, (record, word) in enumerate(zip(function["sass-instructions"], words, strict=True))
    )
    sm = version["SM"]["version"]
    return MachineCode(sm["major"] * 10 + sm["minor"], instructions)


def _nvdisasm(binary: Path) -> str:
    try:
        from triton import knobs
    except ModuleNotFoundError:
        raise ToolchainError(
            "machine code is read with the disassembler that comes with Triton, which is not installed",
            at=binary,
            fix="install it: pip install 'llmc-compiler[gpu]'",
        ) from None

    result = subprocess.run([knobs.nvidia.nvdisasm.path, "-json", str(binary)], capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip() or "no message").splitlines()[-1]
        raise ToolchainError(
            f"nvdisasm cannot read the cubin: {reason}", at=binary, fix="build the engine again on this machine"
        )
    return result.stdout


def _instruction(address: int, entry: dict[str, str], word: int) -> Instruction:
    name, *modifiers = entry["opcode"].split(".")
    control = word >> 41
    scoreboard = control >> 5 & 7
    return Instruction(
        address=address,
        name=name,
        modifiers=tuple(modifiers),
        operands=entry.get("operands", ""),
        predicate=entry.get("predicate"),
        stall=control & 15,
        write_scoreboard=None if scoreboard == _NO_SCOREBOARD else scoreboard,
        waits=frozenset(number for number in range(6) if control >> 11 >> number & 1),
    )


def _control_words(binary: Path, entry: str, start: int, count: int) -> Iterator[int]:
    """The upper half of each instruction. Its bits from 41 on: stall 4, yield 1, scoreboards 3 + 3, wait mask 6.

    Source: Jia et al. 2018, "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", section 2.1.
    """
    text = _section(binary.read_bytes(), f".text.{entry}")
    for number in range(count):
        yield struct.unpack_from("<Q", text, start + number * _INSTRUCTION_BYTES + 8)[0]


def _section(elf: bytes, name: str) -> bytes:
    """Bytes of a section of a 64-bit little-endian ELF file, which nvdisasm has read before."""
    offset, entry_size, count, names_index = *struct.unpack_from("<Q", elf, 40), *struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + number * entry_size) for number in range(count)]
    names_start = headers[names_index][4]
    for header in headers:
        begin = names_start + header[0]
        if elf[begin : elf.index(b"\0", begin)] == name.encode():
            return elf[header[4] : header[4] + header[5]]
    raise AssertionError(f"nvdisasm found {name}")
