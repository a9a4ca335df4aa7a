"""The parameter of a GPU kernel that an argument of a launch needs: codegen compiles for it, the runtime checks it."""

from collections.abc import Mapping

from llmc.program.arrival_counters import ARRIVALS
from llmc.program.device_kernel import DeviceParameter
from llmc.program.launch_arguments import Argument, Operand
from llmc.program.program import ITEMSIZES, Program
from llmc.program.step_outputs import (
    ADAPTERS,
    CHOICE_INPUTS,
    CHOICE_OUTPUTS,
    COMPACTION,
    GROUP_INPUTS,
    ROW_ADAPTERS,
    STATE_SLOTS,
    STEP_INPUTS,
    group_input,
)

_ALIGNMENT = 16
POINTERS = {"F32": "*fp32", "BF16": "*bf16", "F16": "*fp16", "I32": "*i32", "I64": "*i64", "I8": "*i8", "U8": "*u8"}

OperandDtypes = Mapping[tuple[str, str], str]


def parameter_of(dtypes: OperandDtypes, name: str, value: Argument) -> DeviceParameter:
    """The parameter of that name for an operand, a count or a number. dtypes: operand_dtypes of the program.

    Raises KeyError for a dtype that no kernel takes.
    """
    if isinstance(value, Operand):
        dtype = dtype_of(dtypes, value)
        return DeviceParameter(name, POINTERS[dtype], value.offset * ITEMSIZES[dtype] % _ALIGNMENT == 0)
    if isinstance(value, float):
        return DeviceParameter(name, "fp32", False)
    if isinstance(value, int):
        return DeviceParameter(name, "i32" if -(2**31) <= value < 2**31 else "i64", value % _ALIGNMENT == 0)
    return DeviceParameter(name, "i32", False)


def dtype_of(dtypes: OperandDtypes, operand: Operand) -> str:
    """The dtype that the operand points to."""
    return dtypes.get((operand.space, operand.name), "F32")


def operand_dtypes(program: Program) -> OperandDtypes:
    """The dtypes of all operands except logits, by space and name.

    Buffers, weights, caches, inputs and outputs themselves start at multiples of 16.
    """
    buffers = (*program.buffers, *(b for a in program.alternatives for b in a.buffers))
    dtypes = {("buffer", buffer.name): buffer.dtype for buffer in buffers}
    dtypes |= {("weight", slot.name): slot.dtype for slot in program.weights}
    dtypes |= {("cache", name): cache.dtype for name, cache in program.cache_names().items()}
    dtypes |= {("engine", "ranks"): "I64", (ARRIVALS.space, ARRIVALS.name): "I32"}
    if program.adapters is not None:
        dtypes |= {("adapter", name): dtype for name, dtype in program.adapters.dtypes().items()}
    dtypes |= {("input", name): "I32" for name in (ADAPTERS, ROW_ADAPTERS, STATE_SLOTS, COMPACTION)}
    dtypes |= {("input", group_input(n, 1 + g)): "I32" for g in range(len(program.policies)) for n in GROUP_INPUTS}
    dtypes |= {("input", name): dtype for name, dtype in (STEP_INPUTS | CHOICE_INPUTS).items()}
    return dtypes | {("output", name): dtype for name, dtype in CHOICE_OUTPUTS.items()}
