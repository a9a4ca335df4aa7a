"""A launch's kernel with the types of its parameters, as lowering records it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmc.codegen.triton.backend import python_function
from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.program import DeviceKernel, DeviceParameter
from llmc.program.launch_arguments import Operand

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}
_DTYPES |= {torch.int8: "i8", torch.uint8: "u8", torch.int64: "i64", torch.bool: "i1"}


def specialized_kernel(memory: Mapping[tuple[str, str], Tensor], launch: DeviceLaunch, name: str) -> DeviceKernel:
    """memory: the tensors that operands name."""
    code = python_function(launch.function).__code__
    parameters = []
    for argument in code.co_varnames[: code.co_argcount]:
        value = launch.arguments.get(argument)
        if isinstance(value, Operand):
            dtype = memory[value.space, value.name].dtype
            parameters.append(DeviceParameter(argument, f"*{_DTYPES[dtype]}", True))
        elif value is not None:
            kind = "fp32" if isinstance(value, float) else "i32"
            parameters.append(DeviceParameter(argument, kind, isinstance(value, int) and value % 16 == 0))
    absent = {argument: None for argument, value in launch.arguments.items() if value is None}
    return DeviceKernel(
        name=name,
        source=code.co_filename,
        function=code.co_name,
        parameters=tuple(parameters),
        constants={**launch.constants, **absent},
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
