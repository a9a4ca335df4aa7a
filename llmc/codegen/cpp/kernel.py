"""The record of a C++ kernel: its functions, their arguments, and its refusals.

Most take what their op takes. A field of a kernel's struct with the name of an argument of the op is that argument:
rows, a vector or a number, as the field's type says. Fields that are sizes are axes of arguments, which are named.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass

import torch
from torch import fx

from llmc.codegen.backend import KernelCall
from llmc.codegen.call import Call, arguments_of
from llmc.codegen.cpp.kernel_api import kernel_api
from llmc.codegen.cpp.kernel_library import function_name
from llmc.graph.axes import Axis, fits, ranks_of, tensor_axes
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Argument
from llmc.targets import CpuTarget

# Element types of activations and weights, and of scales.
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
SCALES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

Arguments = dict[str, Argument]
TensorAxes = Mapping[str, tuple[Axis, ...]]
# As Backend.calls gives them.
Groups = tuple[tuple[KernelCall, ...], ...]


@dataclass(frozen=True)
class Kernel:
    """A C++ kernel of an op. family: the family of its functions, one for each combination of element_types. arguments:
    by the fields of their struct; what is left out, or None, is zero. in_place: an argument that may lie where a result
    goes, and which result. groups: the launches that a call becomes."""

    family: str | Callable[[Call], str]
    element_types: Callable[[Call], tuple[str, ...]]
    arguments: Callable[[Call], Arguments]
    refusal: Callable[[fx.Node, CpuTarget], Refusal | None]
    in_place: tuple[tuple[str, int], ...] = ()
    groups: Callable[[KernelCall, Call], Groups] = lambda called, call: ((called,),)


def no_more(call: Call) -> Arguments:
    """Return no arguments in addition to the op's."""
    return {}


def by_name(
    family: str,
    axes: str,
    *,
    results: Sequence[str] = ("y",),
    typed: Sequence[str] | None = None,
    in_place: tuple[tuple[str, int], ...] = (),
    more: Callable[[Call], Arguments] = no_more,
) -> Kernel:
    """A kernel whose struct has the names of its op.

    axes: the axes of tensor arguments, as `x[tokens | heads head_dim] cos[_ | half]` (graph/axes.py); their names are
    the fields that are their sizes, 1 for one that may be missing and is. results: the fields that say where results
    go. typed: the arguments whose element types choose the function; the first of axes unless given. more: fields other
    than these, or another value than the argument's.
    """
    tensors = tensor_axes(axes)
    names = tuple(tensors)[:1] if typed is None else tuple(typed)

    def element_types(call: Call) -> tuple[str, ...]:
        return tuple(DTYPES[call.dtype(name)] for name in names)

    def refusal(node: fx.Node, target: CpuTarget) -> Refusal | None:
        return refuse_dtypes(node, names) or refuse_ranks(node, tensors)

    def arguments(call: Call) -> Arguments:
        return named_arguments(call, function_name(family, element_types(call)), tensors, results, more(call))

    return Kernel(family, element_types, arguments, refusal, in_place)


def named_arguments(call: Call, function: str, axes: TensorAxes, results: Sequence[str], more: Arguments) -> Arguments:
    """The arguments of a function whose struct has the names of its op, as by_name says them."""
    api = kernel_api()
    fields = {name: kind for name, kind, *_ in api.structs[api.kernels[function]]._fields_}
    arguments: Arguments = {}
    for name, of_tensor in axes.items():
        arguments |= _sizes(call, name, of_tensor)
    for index, name in enumerate(results):
        result = call.result(index)
        arguments[name] = result if fields[name] is api.structs["LlmcRows"] else result.pointer
    for argument in call.op._schema.arguments:
        name = argument.name
        if name not in arguments | more:
            kind = fields[name]
            read = call.vector if kind is c_void_p else call.rows if kind is api.structs["LlmcRows"] else call.plain
            arguments[name] = read(name)
    return arguments | more


def refuse_dtypes(node: fx.Node, names: Sequence[str]) -> Refusal | None:
    """Refuse the first of these arguments whose dtype no kernel reads."""
    arguments = arguments_of(node)
    for name in names:
        if (dtype := arguments[name].meta["val"].dtype) not in DTYPES:
            return Refusal(f"{name} is {dtype}; kernels know float32 and bfloat16", node)
    return None


def refuse_ranks(node: fx.Node, axes: TensorAxes) -> Refusal | None:
    """A refusal for the first argument whose number of axes differs from the named ones, or None."""
    arguments = arguments_of(node)
    for name, of_tensor in axes.items():
        shape = arguments[name].meta["val"].shape
        if not fits(len(shape), of_tensor):
            return Refusal(f"{name} has shape {list(shape)}; the kernel takes rank {ranks_of(of_tensor)}", node)
    return None


def _sizes(call: Call, name: str, axes: tuple[Axis, ...]) -> Arguments:
    inner, sizes = [axis for axis in axes if not axis.rows], list(call.shape(name))
    counts: Arguments = {axis.letter: call.count(name) for axis in axes if axis.rows}
    for axis in inner:
        if axis.rest:
            counts[axis.letter] = math.prod(sizes)
        else:
            counts[axis.letter] = 1 if axis.optional and len(sizes) < len(inner) else sizes.pop(0)
    counts.pop("_", None)
    return counts
