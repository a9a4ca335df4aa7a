"""A copy of a module that holds no weight data: what capture traces, so that the user's own module is never touched."""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def fake_copy(module: ModuleT, dtype: torch.dtype, *, cast_buffers: bool) -> ModuleT:
    """A copy in evaluation mode with fake CPU parameters, floating-point ones in `dtype`; ties are kept.

    Buffers keep their data. cast_buffers: give floating-point ones `dtype` too, as module.to(dtype) does.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    # deepcopy takes what it finds in the memo, by id, in place of copying it.
    memo: dict[int, object] = {id(p): _fake(p, dtype, mode) for p in module.parameters()}
    for buffer in module.buffers():
        value = buffer.detach().cpu()
        memo[id(buffer)] = value.to(dtype) if cast_buffers and value.is_floating_point() else value
    return copy.deepcopy(module, memo).eval()


def make_parameters_fake(module: nn.Module) -> None:
    """Turn meta parameters into fake CPU ones in place, so that the graph names no meta device; ties are kept."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                if id(parameter) not in fakes:
                    fakes[id(parameter)] = _fake(parameter, parameter.dtype, mode)
                submodule._parameters[name] = fakes[id(parameter)]


def _fake(parameter: Tensor, dtype: torch.dtype, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        value = torch.empty(
            parameter.shape, dtype=dtype if parameter.is_floating_point() else parameter.dtype, device="cpu"
        )
        return nn.Parameter(value, requires_grad=False)
