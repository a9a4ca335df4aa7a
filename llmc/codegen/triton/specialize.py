"""Give every launch the kernel specialization that its arguments allow; equal ones are one kernel.

A parameter's type follows from its argument. If a pointer's address, or a number, is known to be a multiple of 16, the
compiler can load 16 bytes at once. A pointer qualifies if this is true for every T and L, a number if it is constant.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from llmc.codegen.triton.backend import Unspecialized
from llmc.program import LIBRARY, DeviceKernel, DeviceParameter, Launch, Program
from llmc.program.launch_arguments import Argument, Operand
from llmc.program.launch_signature import OperandDtypes, dtype_of, operand_dtypes, parameter_of


def specialize(
    program: Program, kernels: Mapping[str, Unspecialized], sources: Mapping[str, str], loops: str
) -> Program:
    """The program with its kernels, and launches that name them.

    sources: the engine's file of each module. loops: its file of generated loops.
    """
    names: dict[tuple[Unspecialized, tuple[DeviceParameter, ...]], str] = {}
    counts: Counter[str] = Counter()
    dtypes = operand_dtypes(program)

    def specialized(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
        return tuple(replace(x, kernel=name_of(x), dtypes=_dtypes(x, dtypes)) for x in launches)

    def name_of(launch: Launch) -> str:
        kernel = kernels[launch.kernel]
        key = kernel, tuple(_parameter(dtypes, name, value) for name, value in launch.arguments.items())
        if key not in names:
            names[key] = f"{kernel.function}.{counts[kernel.function]}"
            counts[kernel.function] += 1
        return names[key]

    launches = specialized(program.launches)
    alternatives = tuple(replace(a, launches=specialized(a.launches)) for a in program.alternatives)
    device_kernels = tuple(
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
    return replace(program, launches=launches, alternatives=alternatives, kernels=device_kernels)


def _parameter(dtypes: OperandDtypes, name: str, value: Argument) -> DeviceParameter:
    is_constant = value is None or isinstance(value, bool | str)
    assert not is_constant, f"{name} is {value!r}: make it a constant of the kernel"
    return parameter_of(dtypes, name, value)


def _dtypes(launch: Launch, dtypes: OperandDtypes) -> tuple[str, ...]:
    """The distinct dtypes of the launch's operands, in order."""
    return tuple(dict.fromkeys(dtype_of(dtypes, a) for a in launch.arguments.values() if isinstance(a, Operand)))
