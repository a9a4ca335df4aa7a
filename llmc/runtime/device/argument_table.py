"""The argument values of all launches of a program, computed together for each step, where the driver reads them.

A value is a constant plus a term that many values share: a multiple of a count of the step, the place of an input, or
the scratch memory. So a step costs a few operations on arrays, not a few for each argument.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.program import DeviceBinary, DeviceParameter
from llmc.program.launch_arguments import Count, Rows
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.program import CallArgument, PlannedCall, Pointer

_COUNTS = (Count.TOKENS, Count.LOGIT_ROWS, Count.REQUESTS, Count.MAX_BLOCKS)


@dataclass(frozen=True)
class _Term:
    """A number that a step adds to constants. coefficients: factors of _COUNTS. input: the input whose address is
    added. alignment: the term is the address of scratch memory, rounded up to it."""

    coefficients: tuple[int, ...] = (0,) * len(_COUNTS)
    input: str | None = None
    alignment: int | None = None


class ArgumentTable:
    """Eight bytes for each argument, at fixed addresses, and for each launch the array of pointers to its values.

    launches: calls with the binaries that they launch. addresses: where the memory (space, name) of pointers starts on
    the device, except inputs whose place depends on the step. The driver reads values during a launch call only, so
    `fill` may follow at once.
    """

    def __init__(
        self, launches: Sequence[tuple[PlannedCall, DeviceBinary]], addresses: Mapping[tuple[str, str], int]
    ) -> None:
        constants, terms, starts = list[int](), list[_Term](), list[int]()
        for call, binary in launches:
            starts.append(len(constants))
            for parameter, argument in zip(call.kernel.parameters, call.arguments, strict=True):
                constant, term = _split(parameter, argument, addresses)
                constants.append(constant)
                terms.append(term)
            # Triton's trailing pointers: the first is to global scratch memory, the others are null.
            for extra in range(binary.extra_pointers):
                constants.append(0)
                has_scratch = extra == 0 and binary.scratch_bytes
                terms.append(_Term(alignment=binary.scratch_alignment) if has_scratch else _Term())
        numbers = {term: number for number, term in enumerate(dict.fromkeys(terms))}
        self._constants = np.array(constants, np.int64)
        self._term_of = np.array([numbers[term] for term in terms], np.intp)
        self._coefficients = np.array([term.coefficients for term in numbers], np.int64).reshape(-1, len(_COUNTS))
        self._inputs = [(number, term.input) for term, number in numbers.items() if term.input is not None]
        self._aligned = [(number, term.alignment) for term, number in numbers.items() if term.alignment is not None]
        # At least one, so that a launch without arguments has a valid address.
        self._values = np.zeros(max(1, len(constants)), np.int64)
        self._pointers = self._values.ctypes.data + 8 * np.arange(len(self._values), dtype=np.int64)
        self._used = self._values[: len(constants)]
        self.addresses = [self._pointers.ctypes.data + 8 * start for start in starts]

    def fill(self, shape: StepShape, inputs: int, scratch: int) -> None:
        """Compute the values of every launch for a step. inputs: where its inputs start on the device. scratch: where
        the scratch memory starts, before alignment."""
        counts = np.array([shape.tokens, shape.logit_rows, shape.requests, shape.max_blocks], np.int64)
        terms = self._coefficients @ counts
        offsets = shape.input_offsets()
        for number, name in self._inputs:
            terms[number] += inputs + offsets[name]
        for number, alignment in self._aligned:
            terms[number] = scratch + -scratch % alignment
        np.take(terms, self._term_of, out=self._used, mode="clip")
        self._used += self._constants


def _split(
    parameter: DeviceParameter, argument: CallArgument, addresses: Mapping[tuple[str, str], int]
) -> tuple[int, _Term]:
    """A value's constant, and the rest."""
    if isinstance(argument, Pointer):
        offset = argument.offset
        coefficients = (offset.tokens, offset.logit_rows, 0, 0)
        if argument.space == "input" and ("input", argument.name) not in addresses:
            return offset.constant, _Term(coefficients, input=argument.name)
        return addresses[argument.space, argument.name] + offset.constant, _Term(coefficients)
    if isinstance(argument, Count):
        return 0, _Term(tuple(int(argument is count) for count in _COUNTS))
    if isinstance(argument, Rows):
        return 0, _Term(tuple(argument.times * (argument.count is count) for count in _COUNTS))
    if parameter.type == "fp32":
        (bits,) = struct.unpack("<q", struct.pack("<f4x", argument.value))
        return bits, _Term()
    return int(argument.value), _Term()
