"""Give every launch the kernel specialization that its arguments allow; equal ones are one kernel.

A parameter's type follows from what is passed. That a pointer's address, or a number, is a multiple of 16 lets the
compiler load 16 bytes at once: it holds for a pointer if it does for every T and L, and for a number known now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from llmc.codegen.call import Argument
from llmc.codegen.triton.backend import Unspecialized
from llmc.program import (
    CHOICE_INPUTS,
    CHOICE_OUTPUTS,
    ITEMSIZES,
    LIBRARY,
    DeviceKernel,
    DeviceParameter,
    Launch,
    Program,
    parse_operand,
)

_ALIGNMENT = 16
_POINTERS = {"F32": "*fp32", "BF16": "*bf16", "F16": "*fp16", "I32": "*i32", "I8": "*i8", "U8": "*u8"}


def specialize(
    program: Program, kernels: Mapping[str, Unspecialized], sources: Mapping[str, str], loops: str
) -> Program:
    """The program with its kernels, and launches that name them.

    sources: the engine's file of each module. loops: its file of generated loops.
    """
    names: dict[tuple[Unspecialized, tuple[DeviceParameter, ...]], str] = {}
    counts: Counter[str] = Counter()
    dtypes = _dtypes(program)

    def specialized(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
        return tuple(replace(launch, kernel=name_of(launch)) for launch in launches)

    def name_of(launch: Launch) -> str:
        kernel = kernels[launch.kernel]
        key = kernel, tuple(_parameter(dtypes, name, value) for name, value in launch.arguments.items())
        if key not in names:
            names[key] = f"{kernel.function}.{counts[kernel.function]}"
            counts[kernel.function] += 1
        return names[key]

    launches = specialized(program.launches)
    alternatives = tuple(replace(a, launches=specialized(a.launches)) for a in program.alternatives)
    found = tuple(
        DeviceKernel(
            name=name,
            source=loops if kernel.module is None else sources.get(kernel.module, LIBRARY),
            function=kernel.function,
            parameters=parameters,
            constants=dict(kernel.constants),
            num_warps=kernel.num_warps,
            num_stages=kernel.num_stages,
        )
        for (kernel, parameters), name in names.items()
    )
    return replace(program, launches=launches, alternatives=alternatives, kernels=found)


def _parameter(dtypes: Mapping[tuple[str, str], str], name: str, value: Argument) -> DeviceParameter:
    if isinstance(value, str) and ":" in value:
        operand = parse_operand(value)
        dtype = dtypes.get((operand.space, operand.name), "F32" if operand.space == "output" else "I32")
        return DeviceParameter(name, _POINTERS[dtype], operand.offset * ITEMSIZES[dtype] % _ALIGNMENT == 0)
    if isinstance(value, float):
        return DeviceParameter(name, "fp32", False)
    if isinstance(value, int) and not isinstance(value, bool):
        return DeviceParameter(name, "i32" if -(2**31) <= value < 2**31 else "i64", value % _ALIGNMENT == 0)
    assert isinstance(value, str), f"{name} is {value!r}: make it a constant of the kernel"
    return DeviceParameter(name, "i32", False)


def _dtypes(program: Program) -> dict[tuple[str, str], str]:
    """Of what pointers point to, unless it is an int32 input or the logits.

    Buffers, weights, caches, inputs and outputs themselves start at multiples of 16.
    """
    buffers = (*program.buffers, *(b for a in program.alternatives for b in a.buffers))
    found = {("buffer", buffer.name): buffer.dtype for buffer in buffers}
    found |= {("weight", slot.name): slot.dtype for slot in program.weights}
    found |= {("cache", f"{i}.{part}"): cache.dtype for i, cache in enumerate(program.caches) for part in "kv"}
    found |= {("input", name): dtype for name, dtype in CHOICE_INPUTS.items()}
    return found | {("output", name): dtype for name, dtype in CHOICE_OUTPUTS.items()}
