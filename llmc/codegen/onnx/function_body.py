"""The nodes of one function while it is written: ops in, names of values out."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import helper, numpy_helper

from llmc.codegen.onnx.types import onnx_type

# The end of a slice that takes the rest.
END = np.iinfo(np.int64).max


class NotInOnnx(Exception):
    """That a call has no function of standard ops, and why."""


@dataclass(frozen=True)
class Value:
    """A tensor argument of an op, or its result: what the function calls it, and the fake value, which has its shape
    and dtype; a size (SymInt) is a scalar. is_decoded: whether codes are made numbers while the model runs."""

    name: str
    fake: Any
    is_decoded: bool = False

    @property
    def shape(self) -> list[Any]:
        """The sizes: numbers, and SymInts for sizes that are known only when the graph runs."""
        return list(self.fake.shape) if isinstance(self.fake, torch.Tensor) else []

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype; int64 for a size."""
        return self.fake.dtype if isinstance(self.fake, torch.Tensor) else torch.int64

    def size(self, axis: int) -> int:
        """A size that is known now."""
        return int(self.shape[axis])


Operand = str | Value | None


class Body:
    """A function's nodes, in order; a call appends one and gives its result's name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def __call__(self, op: str, *inputs: Operand, **attributes: Any) -> str:
        """A node of a standard op with one result. None: an input that is left out."""
        return self.several(op, 1, *inputs, **attributes)[0]

    def several(self, op: str, results: int, *inputs: Operand, **attributes: Any) -> tuple[str, ...]:
        """Add a node with `results` results."""
        outputs = tuple(self._name() for _ in range(results))
        last = max((i for i, operand in enumerate(inputs) if operand is not None), default=-1)
        names = [_input(operand) for operand in inputs[: last + 1]]
        self.nodes.append(helper.make_node(op, names, outputs, **attributes))
        return outputs

    def constant(self, value: npt.NDArray[Any]) -> str:
        """Add a constant and return its name; equal constants share one."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._constants:
            self._constants[key] = self._name()
            tensor = numpy_helper.from_array(value)
            self.nodes.append(helper.make_node("Constant", [], [self._constants[key]], value=tensor))
        return self._constants[key]

    def number(self, value: float) -> str:
        """An fp32 scalar."""
        return self.constant(np.array(value, np.float32))

    def integer(self, value: int) -> str:
        """An int64 scalar."""
        return self.constant(np.array(value, np.int64))

    def integers(self, values: Sequence[int]) -> str:
        """An int64 vector."""
        return self.constant(np.array(values, np.int64))

    def cast(self, x: Operand, dtype: torch.dtype) -> str:
        """Convert to another dtype; an argument that already has it is returned as it is."""
        if isinstance(x, Value) and onnx_type(x.dtype) == onnx_type(dtype):
            return x.name
        return self("Cast", x, to=onnx_type(dtype))

    def reshape(self, x: Operand, *sizes: int) -> str:
        """Reshape x. In sizes, 0 keeps the size of x at that place, and one -1 stands for the rest of its elements."""
        return self("Reshape", x, self.integers(sizes))

    def transpose(self, x: Operand, *axes: int) -> str:
        """Axes in another order."""
        return self("Transpose", x, perm=list(axes))

    def unsqueeze(self, x: Operand, *axes: int) -> str:
        """Add axes of one element to x."""
        return self("Unsqueeze", x, self.integers(axes))

    def squeeze(self, x: Operand, *axes: int) -> str:
        """Remove axes of one element."""
        return self("Squeeze", x, self.integers(axes))

    def length(self, x: Operand, axis: int) -> str:
        """The size of an axis that is not negative, int64 [1]."""
        return self("Shape", x, start=axis, end=axis + 1)

    def slice(self, x: Operand, axis: int, start: int, end: int) -> str:
        """Select elements of an axis."""
        return self("Slice", x, *(self.integers([bound]) for bound in (start, end, axis)))

    def sizes(self, sizes: Sequence[int | Value]) -> str:
        """An int64 vector of sizes, some of which may be known only when the graph runs."""
        if all(isinstance(size, int) for size in sizes):
            return self.integers([size for size in sizes if isinstance(size, int)])
        parts = [self.integers([s]) if isinstance(s, int) else self.reshape(s, 1) for s in sizes]
        return self("Concat", *parts, axis=0)

    def _name(self) -> str:
        self._count += 1
        return f"t{self._count}"


class InnerBody(Body):
    """The nodes of a loop's body, which may read the values of the function around it: no names are those of both."""

    def graph(
        self, name: str, inputs: Mapping[str, int], outputs: Mapping[str, int], scalars: Collection[str] = ()
    ) -> onnx.GraphProto:
        """Return the statements as a graph, for a node that runs one.

        inputs, outputs: element types by name, in order. scalars: the names among them whose shape is known.
        """

        def infos(values: Mapping[str, int]) -> list[onnx.ValueInfoProto]:
            return [
                helper.make_tensor_value_info(value, kind, [] if value in scalars else None)
                for value, kind in values.items()
            ]

        return helper.make_graph(self.nodes, name, infos(inputs), infos(outputs))

    def _name(self) -> str:
        return f"inner_{super()._name()}"


def standard(op: str, **attributes: Any) -> Callable[..., str]:
    """The function of an op that is a standard op of its tensors, in their order, and of nothing else."""

    def build(b: Body, **tensors: Value) -> str:
        return b(op, *tensors.values(), **attributes)

    return build


def _input(operand: Operand) -> str:
    return "" if operand is None else operand if isinstance(operand, str) else operand.name
