"""A launch's arguments as the driver takes them: an array of pointers to values of eight bytes each."""

import ctypes
import struct
from collections.abc import Callable

from llmc.program import DeviceBinary
from llmc.program.launch_arguments import Count, Rows
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.program import PlannedCall, Pointer

Address = Callable[[str, str], int]


class PackedArguments:
    """The values and the array that points at them; the driver reads both during the launch only."""

    def __init__(self, values: list[bytes]) -> None:
        self._values = ctypes.create_string_buffer(b"".join(values), 8 * len(values) or 8)
        start = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * max(1, len(values)))(*(start + 8 * i for i in range(len(values))))

    @property
    def address(self) -> int:
        """The address of the array of pointers."""
        return ctypes.addressof(self._pointers)


def argument_values(call: PlannedCall, shape: StepShape, address: Address, extra: list[int]) -> list[bytes]:
    """Eight bytes for each parameter of the call's kernel in order, then the `extra` pointers.

    address: where the memory (space, name) of a pointer starts on the device.
    """
    counts = shape.counts()
    values = []
    for parameter, argument in zip(call.kernel.parameters, call.arguments, strict=True):
        if isinstance(argument, Pointer):
            offset = argument.offset.at(tokens=shape.tokens, logit_rows=shape.logit_rows)
            values.append(struct.pack("<Q", address(argument.space, argument.name) + offset))
        elif isinstance(argument, Count | Rows):
            values.append(struct.pack("<q", argument.at(counts)))
        elif parameter.type == "fp32":
            values.append(struct.pack("<f4x", argument.value))
        else:
            values.append(struct.pack("<q", int(argument.value)))
    return values + [struct.pack("<Q", pointer) for pointer in extra]


def extra_pointers(binary: DeviceBinary, scratch: int) -> list[int]:
    """The trailing pointers that Triton added to a binary: the first to its global scratch memory, the others null."""
    return [scratch if i == 0 and binary.scratch_bytes else 0 for i in range(binary.extra_pointers)]


def scratch_bytes(binary: DeviceBinary, grid: tuple[int, int, int]) -> int:
    """Global scratch memory that all blocks of a launch take together, alignment included."""
    if not binary.scratch_bytes:
        return 0
    x, y, z = grid
    per_program = -(-binary.scratch_bytes // binary.scratch_alignment) * binary.scratch_alignment
    return x * y * z * per_program + binary.scratch_alignment
