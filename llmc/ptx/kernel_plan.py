"""The resources of a kernel per block: threads, memory, registers, and the places of its variables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmc.ptx.global_memory import Buffer
from llmc.ptx.lanes import UNSIGNED, Values
from llmc.ptx.matrix_descriptor import CHUNK
from llmc.ptx.module import Immediate, Instruction, Kernel
from llmc.ptx.shared_memory import SHARED_BASE

# The address of variables in global memory, far from the buffers of launches.
_VARIABLES_BASE = 1 << 56


@dataclass(frozen=True)
class KernelPlan:
    """The memory that a kernel needs. module: the name of its file. shared_bytes, local_bytes: bytes of a block and of
    a thread. symbols: addresses of variables and parameters, each in its space. variables: those in global memory."""

    kernel: Kernel
    module: str
    threads: int
    shared_bytes: int
    local_bytes: int
    symbols: Mapping[str, int]
    variables: tuple[Buffer, ...]

    @cached_property
    def granule(self) -> int:
        """The least number of bytes of shared memory that an instruction touches."""
        sizes = (_shared_bytes(instruction) for instruction in self.kernel.instructions)
        return min((size for size in sizes if size is not None), default=CHUNK)

    @cached_property
    def has_wgmma(self) -> bool:
        """Whether registers must be watched."""
        return any(instruction.opcode.startswith("wgmma") for instruction in self.kernel.instructions)

    @cached_property
    def waits_for_grids(self) -> bool:
        """Whether the kernel can be launched before earlier ones end."""
        return any(instruction.opcode == "griddepcontrol.wait" for instruction in self.kernel.instructions)

    @cached_property
    def blank_registers(self) -> tuple[Values, ...]:
        """Return every register, with zeros. One of 128 bits has no value: no instruction that is executed takes it."""
        blanks = {n: np.zeros((1, 1), UNSIGNED[n]) for n in UNSIGNED}
        nothing = np.zeros((1, 1), np.bool_)
        return tuple(nothing if r.is_predicate else blanks.get(r.nbytes, nothing) for r in self.kernel.registers)


def plan_kernel(kernel: Kernel, module: str, threads: int, dynamic_bytes: int) -> KernelPlan:
    """Place a kernel's variables. dynamic_bytes: bytes of dynamic shared memory, which the launch gives.

    A variable whose size the launch decides begins after all others.
    """
    symbols = {parameter.name: parameter.offset for parameter in kernel.parameters}
    shared, local, variables = 0, 0, list[Buffer]()
    for variable in sorted(kernel.variables.values(), key=lambda v: (v.nbytes == 0, v.name)):
        aligned = -(-shared // variable.alignment) * variable.alignment
        if variable.space == "shared":
            symbols[variable.name] = SHARED_BASE + aligned
            shared = aligned + variable.nbytes
        elif variable.space == "local":
            symbols[variable.name] = local
            local += -(-variable.nbytes // 16) * 16
        else:
            address = _VARIABLES_BASE + (len(variables) << 24)
            data = np.frombuffer(variable.content, np.uint8)
            symbols[variable.name] = address
            variables.append(Buffer(variable.name, address, data, is_writable=False, may_change=False))
    return KernelPlan(kernel, module, threads, shared + dynamic_bytes, local, symbols, tuple(variables))


_ELEMENT = re.compile(r"(?:\.v([248]))?\.[bsuf](8|16|32|64)$")


def _shared_bytes(instruction: Instruction) -> int | None:
    opcode = instruction.opcode
    if opcode.startswith(("cp.async.ca", "cp.async.cg")):
        size = instruction.operands[2]
        return size.value if isinstance(size, Immediate) else 4
    if opcode.startswith("mbarrier"):
        return 8
    if ".shared" not in opcode or not opcode.startswith(("ld.", "st.", "atom.", "red.")):
        return None
    match = _ELEMENT.search(opcode)
    return 1 if match is None else int(match[1] or 1) * int(match[2]) // 8
