"""Which opcodes kernels use, and which of them the machine does not know."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from llmc.ptx.code import refusals_of
from llmc.ptx.module import Instruction
from llmc.ptx.parse import parse_module


@dataclass(frozen=True)
class OpcodeUse:
    """An opcode. count: in how many instructions it stands. kernels: which have it. refused: why the machine does not
    execute it, None if it does. first: its first instruction, with the kernel it is in."""

    opcode: str
    count: int
    kernels: tuple[str, ...]
    refused: str | None
    first: tuple[str, Instruction]


def survey(texts: Mapping[str, str]) -> tuple[OpcodeUse, ...]:
    """The opcodes of PTX texts, by kernel, in alphabetical order. Raises PtxError if a text is not PTX."""
    by_opcode: dict[str, list[tuple[str, Instruction]]] = defaultdict(list)
    refused: dict[str, str] = {}
    for name, text in texts.items():
        for kernel in parse_module(text, name).kernels:
            for instruction in kernel.instructions:
                by_opcode[instruction.opcode].append((name, instruction))
            refused |= {refusal.instruction.opcode: refusal.reason for refusal in refusals_of(kernel)}
    return tuple(
        OpcodeUse(opcode, len(uses), tuple(dict.fromkeys(name for name, _ in uses)), refused.get(opcode), uses[0])
        for opcode, uses in sorted(by_opcode.items())
    )
