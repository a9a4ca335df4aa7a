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
from llmc.program import DeviceKernel, DeviceParameter, Program, parse_operand

_ALIGNMENT = 16
_POINTERS = {"F32": "*fp32", "BF16": "*bf16", "F16": "*fp16", "I32": "*i32"}
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4}


def specialize(
    program: Program, kernels: Mapping[str, Unspecialized], sources: Mapping[str, str], loops: str
) -> Program:
    """The program with its kernels, and launches that name them.

    sources: the engine's file of each module. loops: its file of generated loops.
    """
    names: dict[tuple[Unspecialized, tuple[DeviceParameter, ...]], str] = {}
    counts: Counter[str] = Counter()
    launches = []
    for launch in program.launches:
        kernel = kernels[launch.kernel]
        key = kernel, tuple(_parameter(program, name, value) for name, value in launch.arguments.items())
        if key not in names:
            names[key] = f"{kernel.function}.{counts[kernel.function]}"
            counts[kernel.function] += 1
        launches.append(replace(launch, kernel=names[key]))
    found = tuple(
        DeviceKernel(
            name=name,
            source=loops if kernel.module is None else sources[kernel.module],
            function=kernel.function,
            parameters=parameters,
            constants=dict(kernel.constants),
            num_warps=kernel.num_warps,
            num_stages=kernel.num_stages,
        )
        for (kernel, parameters), name in names.items()
    )
    return replace(program, launches=tuple(launches), kernels=found)


def _parameter(program: Program, name: str, value: Argument) -> DeviceParameter:
    if isinstance(value, str) and ":" in value:
        operand = parse_operand(value)
        dtype = _dtype(program, operand.space, operand.name)
        return DeviceParameter(name, _POINTERS[dtype], operand.offset * _BYTES[dtype] % _ALIGNMENT == 0)
    if isinstance(value, float):
        return DeviceParameter(name, "fp32", False)
    if isinstance(value, int) and not isinstance(value, bool):
        return DeviceParameter(name, "i32" if -(2**31) <= value < 2**31 else "i64", value % _ALIGNMENT == 0)
    assert isinstance(value, str), f"{name} is {value!r}: make it a constant of the kernel"
    return DeviceParameter(name, "i32", False)


def _dtype(program: Program, space: str, name: str) -> str:
    """Of what a pointer points to. Buffers, weights, caches, inputs and logits themselves start at multiples of 16."""
    if space == "cache":
        return program.caches[int(name.split(".")[0])].dtype
    if space in ("buffer", "weight"):
        return next(
            held.dtype for held in (program.buffers if space == "buffer" else program.weights) if held.name == name
        )
    return "F32" if space == "output" else "I32"
