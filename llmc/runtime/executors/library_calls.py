"""Calls of a library's functions, with as much prepared as does not depend on the step.

Making a tensor view takes more than a microsecond, so products share the views of one step, and the views of weights
are made once. Other functions get new views for every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.program import Affine, library_functions, library_products
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.program import CallArgument, Number, PlannedCall, Pointer

# Views of matrices by address of their memory, dtype, first element, rows, columns and elements from row to row.
Views = dict[tuple[int, torch.dtype, int, int, int, int], Tensor]
# Queues the call for a step. Views that are made for it are added.
LibraryCall = Callable[[StepShape, Views], None]


class DeviceTensors:
    """The device's memory as tensors. spaces: by (space, name), bytes and where in them the memory starts; read at
    each use. inputs: bytes that the step's inputs are in."""

    def __init__(self, spaces: Mapping[tuple[str, str], tuple[Tensor, int]], inputs: Tensor) -> None:
        self._spaces, self.inputs = spaces, inputs

    def at(self, pointer: Pointer, shape: StepShape) -> Tensor:
        """The memory that a pointer refers to, from there to its end."""
        start = pointer.offset.at(tokens=shape.tokens, logit_rows=shape.logit_rows)
        if pointer.space == "input":
            memory, base = self.inputs, shape.input_offsets()[pointer.name]
        else:
            memory, base = self._spaces[pointer.space, pointer.name]
        dtype = TORCH_DTYPES[pointer.dtype]
        end = memory.numel() - (memory.numel() - start - base) % dtype.itemsize
        return memory[start + base : end].view(dtype)

    def whole(self, pointer: Pointer) -> tuple[Tensor, Affine] | None:
        """A tensor of a pointer's memory, and which element of its storage the pointer refers to; None if only the
        step says so, or if it is between elements."""
        if pointer.space == "input":
            return None
        memory, base = self._spaces[pointer.space, pointer.name]
        dtype, offset = TORCH_DTYPES[pointer.dtype], pointer.offset
        parts = (base + memory.storage_offset() + offset.constant, offset.tokens, offset.logit_rows)
        if any(part % dtype.itemsize for part in parts):
            return None
        elements = memory[: memory.numel() - memory.numel() % dtype.itemsize].view(dtype)
        return elements, Affine(*(part // dtype.itemsize for part in parts))


def library_call(call: PlannedCall, tensors: DeviceTensors) -> LibraryCall:
    """Prepare a call of llmc.program.library_functions; queued on torch's current stream."""
    if call.kernel.function in library_products.FUNCTIONS:
        product = _product(call, tensors)
        if product is not None:
            return product
    function = library_functions.FUNCTIONS[call.kernel.function]

    def run(shape: StepShape, views: Views) -> None:
        function(**call.named_arguments(lambda pointer: tensors.at(pointer, shape), shape.counts()))

    return run


class _Matrix:
    """Rows of a step in the device's memory."""

    def __init__(self, elements: Tensor, offset: Affine, columns: int, stride: int) -> None:
        self._elements, self._columns, self._stride = elements, columns, stride
        self._constant, self._tokens, self._logit_rows = offset.constant, offset.tokens, offset.logit_rows
        self._memory = elements.data_ptr(), elements.dtype

    def rows(self, count: int, shape: StepShape, views: Views) -> Tensor:
        """The first `count` rows."""
        start = self._constant + self._tokens * shape.tokens + self._logit_rows * shape.logit_rows
        key = (*self._memory, start, count, self._columns, self._stride)
        view = views.get(key)
        if view is None:
            size, strides = (count, self._columns), (self._stride, 1)
            view = views[key] = torch.as_strided(self._elements, size, strides, start)
        return view


def _product(call: PlannedCall, tensors: DeviceTensors) -> LibraryCall | None:
    """A function of library_products for operands that are whole buffers; None for others."""
    function = call.kernel.function
    multiply = library_products.MULTIPLY[function]
    named = {p.name: argument for p, argument in zip(call.kernel.parameters, call.arguments, strict=True)}
    columns, width = _number(named["IN"]), _number(named["OUT"])
    weight = _whole(named["weight_ptr"], tensors)
    if weight is None or weight[1].tokens or weight[1].logit_rows or columns is None or width is None:
        return None
    # W·x as x times the transpose, whose elements are where they are.
    operand = library_products.as_operand(function, weight[0])
    transposed = operand.as_strided((columns, width), (1, columns), weight[1].constant)
    x = _matrix(named["x_ptr"], named["x_row_stride"], columns, tensors, function)
    y = _matrix(named["y_ptr"], named["y_row_stride"], width, tensors)
    tokens = named["tokens"]
    if x is None or y is None or isinstance(tokens, Pointer):
        return None

    def run(shape: StepShape, views: Views) -> None:
        rows = int(tokens.value) if isinstance(tokens, Number) else tokens.at(shape.counts())
        multiply(x.rows(rows, shape, views), transposed, y.rows(rows, shape, views))

    return run


def _matrix(
    pointer: CallArgument, stride: CallArgument, columns: int, tensors: DeviceTensors, operand_of: str | None = None
) -> _Matrix | None:
    """operand_of: the function that multiplies the rows."""
    whole, step = _whole(pointer, tensors), _number(stride)
    if whole is None or step is None:
        return None
    elements = whole[0] if operand_of is None else library_products.as_operand(operand_of, whole[0])
    return _Matrix(elements, whole[1], columns, step)


def _whole(argument: CallArgument, tensors: DeviceTensors) -> tuple[Tensor, Affine] | None:
    return tensors.whole(argument) if isinstance(argument, Pointer) else None


def _number(argument: CallArgument) -> int | None:
    return int(argument.value) if isinstance(argument, Number) else None
