"""aten's operations on elements: in the elementary functions of llmc/graph/pointwise.py, and these in standard ops."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import fx

from llmc.codegen.onnx.function_body import Body, Value
from llmc.graph.pointwise import Kind, emit, kind_of

_TYPES = {Kind.FLOAT: TensorProto.FLOAT, Kind.INT: TensorProto.INT64, Kind.BOOL: TensorProto.BOOL}
_NUMBERS = {Kind.FLOAT: np.float32, Kind.INT: np.int64, Kind.BOOL: np.bool_}
# The same name in ONNX, except for the capital letter.
_NAMED_ALIKE = (
    "add sub mul div pow and or not neg abs reciprocal sqrt exp log sin cos erf floor ceil tanh sigmoid gelu relu "
    "softplus where"
)
_STANDARD = {
    **{name: name.capitalize() for name in _NAMED_ALIKE.split()},
    "maximum": "Max",
    "minimum": "Min",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "eq": "Equal",
    # Values are fp32 all the way.
    "round_bf16": "Identity",
    "round_f16": "Identity",
}


def pointwise(b: Body, node: fx.Node, values: Mapping[fx.Node, Value]) -> str:
    """The function of a call whose target is in llmc.graph.pointwise.POINTWISE. values: the values of the call's
    tensors."""
    statements = _Statements(b, values)
    result = statements.names[emit(node, statements)]
    return _converted(b, result, kind_of(node.meta["val"].dtype), node.meta["val"].dtype)


def _converted(b: Body, name: str, kind: Kind, dtype: torch.dtype) -> str:
    return b.cast(name, dtype) if kind is Kind.INT and dtype is not torch.int64 else name


class _Statements:
    """As pointwise.Statements, over the values of a function: number i is names[i]."""

    def __init__(self, body: Body, values: Mapping[fx.Node, Value]) -> None:
        self._body, self._values = body, values
        self.names: list[str] = []

    def read(self, argument: Any, kind: Kind) -> int:
        """An argument, converted."""
        if not isinstance(argument, fx.Node):
            return self.number(argument, kind)
        value = self._values[argument]
        own = kind_of(value.dtype)
        if own is kind and (kind is not Kind.INT or value.dtype is torch.int64):
            return self._add(value.name)
        return self._add(self._body("Cast", value, to=_TYPES[kind]))

    def number(self, value: float | int | bool, kind: Kind) -> int:
        """A constant."""
        return self._add(self._body.constant(np.array(value, _NUMBERS[kind])))

    def apply(self, function: str, *operands: int, kind: Kind = Kind.FLOAT) -> int:
        """A function from llmc.graph.pointwise.FUNCTIONS."""
        b, names = self._body, [self.names[operand] for operand in operands]
        if function in ("to_float", "to_int", "to_bool"):
            return self._add(b("Cast", names[0], to=_TYPES[Kind(function.removeprefix("to_"))]))
        if function in _COMPOSED:
            return self._add(_COMPOSED[function](b, kind, *names))
        return self._add(b(_STANDARD[function], *names))

    def reduce(self, reduction: str, operand: int) -> int:
        """Reductions have their own functions, over any axis: aten_rows.py."""
        raise AssertionError(f"a pointwise op reduces by {reduction}")

    def _add(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1


def _floor_div(b: Body, kind: Kind, x: str, y: str) -> str:
    if kind is Kind.FLOAT:
        return b("Floor", b("Div", x, y))
    return b("Div", b("Sub", x, b("Mod", x, y)), y)


def _remainder(b: Body, kind: Kind, x: str, y: str) -> str:
    """The remainder with the sign of the divisor, like Mod of integers."""
    return b("Mod", x, y) if kind is Kind.INT else b("Sub", x, b("Mul", b("Floor", b("Div", x, y)), y))


_COMPOSED: dict[str, Callable[..., str]] = {
    "floor_div": _floor_div,
    "remainder": _remainder,
    "ne": lambda b, kind, x, y: b("Not", b("Equal", x, y)),
    "square": lambda b, kind, x: b("Mul", x, x),
    "rsqrt": lambda b, kind, x: b("Reciprocal", b("Sqrt", x)),
    "silu": lambda b, kind, x: b("Mul", x, b("Sigmoid", x)),
    "gelu_tanh": lambda b, kind, x: b("Gelu", x, approximate="tanh"),
}
