"""Which of a kernel's pointer parameters each memory access goes to, by following addresses through the registers."""

import re
from collections.abc import Mapping, Sequence

from llmc.codegen.triton.machine_code.control_flow import ControlFlow
from llmc.codegen.triton.machine_code.disassembly import Instruction, Register
from llmc.program import DeviceParameter

# Where parameters begin in constant bank 0, by the major compute capability.
_FIRST_PARAMETER = {8: 0x160, 9: 0x210, 10: 0x380, 12: 0x380}
_CONSTANT = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
# From sm_90 on a global address follows a descriptor of memory; before, it is the last in brackets.
_DESCRIBED, _BRACKETED = re.compile(r"desc\[UR\d+\]\[([^\]]*)\]"), re.compile(r"\[([^\]]*)\]")
_NUMBERED = re.compile(r"\b(U?R)(\d+)\b")
GLOBAL_ACCESSES = frozenset({"LDG", "STG", "LDGSTS", "RED", "ATOMG"})
# Results that are not addresses: their operands do not say where the result points.
_DATA = frozenset({"LDG", "LD", "LDS", "LDSM", "LDL", "S2R", "S2UR", "CS2R", "ATOMG", "SHFL"})
_WITHOUT_RESULT = frozenset(
    {"STG", "STS", "STL", "ST", "BRA", "EXIT", "BAR", "RED", "LDGSTS", "UTMALDG", "UTMASTG", "SYNCS", "HGMMA"}
)
_Origins = dict[Register, frozenset[str]]


def parameter_offsets(parameters: Sequence[DeviceParameter]) -> dict[int, str]:
    """Names of pointer parameters by each of the two offsets, from the first parameter on, of their words."""
    offsets: dict[int, str] = {}
    position = 0
    for parameter in parameters:
        size = 8 if parameter.type.startswith("*") or parameter.type.endswith("64") else 4
        position = -(-position // size) * size
        if parameter.type.startswith("*"):
            offsets |= {position: parameter.name, position + 4: parameter.name}
        position += size
    return offsets


def accessed_parameters(
    flow: ControlFlow, parameters: Sequence[DeviceParameter], arch: int
) -> Mapping[int, frozenset[str]]:
    """Return the pointer parameters from which the address of each global load, store and copy comes, by its own
    address.

    A forward dataflow analysis over registers. An address that was itself loaded, as through a table of pointers,
    comes from none.
    """
    base = _FIRST_PARAMETER[arch // 10]
    constants = {base + offset: name for offset, name in parameter_offsets(parameters).items()}
    entering: dict[int, _Origins] = {0: {}}
    pending, accessed = [0], dict[int, frozenset[str]]()
    while pending:
        block = pending.pop()
        origins = dict(entering[block])
        for instruction in flow.blocks[block]:
            if instruction.name in GLOBAL_ACCESSES:
                names = (origins.get(register, frozenset()) for register in _address_registers(instruction))
                accessed[instruction.address] = frozenset().union(*names)
            _step(origins, instruction, constants)
        for following in flow.graph.successors(block):
            is_new = following not in entering
            if _merge(entering.setdefault(following, {}), origins) or is_new:
                pending.append(following)
    return accessed


def _merge(into: _Origins, origins: _Origins) -> bool:
    changed = False
    for register, names in origins.items():
        merged = into.get(register, frozenset()) | names
        if register not in into or merged != into[register]:
            into[register] = merged
            changed = True
    return changed


def _step(origins: _Origins, instruction: Instruction, constants: Mapping[int, str]) -> None:
    registers = instruction.registers
    if instruction.name in _WITHOUT_RESULT or not registers or not _begins_with_register(instruction):
        return
    first, sources = registers[0], registers[1:]
    for index in range(_results(instruction)):
        names = frozenset[str]()
        if instruction.name not in _DATA:
            names = names.union(*(origins.get(register, frozenset()) for register in sources))
            read = {int(offset, 16) for offset in _CONSTANT.findall(instruction.operands)}
            names |= {constants[offset + 4 * index] for offset in read if offset + 4 * index in constants}
        result = Register(first.number + index, first.is_uniform)
        origins[result] = names if instruction.predicate is None else origins.get(result, frozenset()) | names


def _begins_with_register(instruction: Instruction) -> bool:
    return instruction.operands.startswith(("R", "UR")) and not instruction.operands.startswith(("RZ", "URZ"))


def _results(instruction: Instruction) -> int:
    """Registers that are written, of instructions whose results may be addresses."""
    if "128" in instruction.modifiers:
        return 4
    pair = instruction.name == "CS2R" and "32" not in instruction.modifiers
    return 2 if pair or {"64", "WIDE"} & set(instruction.modifiers) else 1


def _address_registers(instruction: Instruction) -> list[Register]:
    """Registers of a global address; a copy to shared memory also has a shared address."""
    brackets = _DESCRIBED.findall(instruction.operands) or _BRACKETED.findall(instruction.operands)[-1:]
    return [Register(int(number), kind == "UR") for text in brackets for kind, number in _NUMBERED.findall(text)]
