"""The one pointwise vocabulary: aten's operations on elements and rows, each written in a few elementary functions.

The ops listed here are legal in graphs (graph/verify.py), printed as loops (codegen/) and evaluated over symbols
(debug/prove/). A printer or an evaluator implements the elementary functions only.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch
from torch import fx

_aten = torch.ops.aten

# Name → number of operands. `to_*` convert between kinds and `round_*` round where the model itself casts down and up
# again.
FUNCTIONS: dict[str, int] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "floor_div", "pow", "maximum", "minimum", "remainder"), 2),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "and", "or"), 2),
    **dict.fromkeys(("neg", "abs", "square", "reciprocal", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "erf"), 1),
    **dict.fromkeys(("floor", "ceil", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "relu", "softplus", "not"), 1),
    **dict.fromkeys(("to_float", "to_int", "to_bool", "round_bf16", "round_f16"), 1),
    "where": 3,
}


class Kind(Enum):
    """The type of an element while it is computed with."""

    FLOAT = "float"
    INT = "int"
    BOOL = "bool"


class Statements(Protocol):
    """Where an operation's elementary functions go; values are numbers that stand for earlier results."""

    def read(self, argument: Any, kind: Kind) -> int:
        """An argument of the node: a tensor's element at the loop's place or a number, converted to `kind`."""

    def number(self, value: float | int | bool, kind: Kind) -> int:
        """A constant."""

    def apply(self, function: str, *operands: int, kind: Kind = Kind.FLOAT) -> int:
        """A function from FUNCTIONS."""

    def reduce(self, reduction: str, operand: int) -> int:
        """A reduction over the columns of an fp32 value."""


Emit = Callable[[Statements, fx.Node], int]


def kind_of(dtype: torch.dtype) -> Kind:
    """Return the kind of number with which a loop computes elements of a dtype."""
    if dtype == torch.bool:
        return Kind.BOOL
    return Kind.FLOAT if dtype.is_floating_point else Kind.INT


def reduces(node: fx.Node) -> bool:
    """Whether the node mixes the elements of a row: its loop runs over its input's last axis, not its result's."""
    return node.target in REDUCTIONS


def emit(node: fx.Node, to: Statements) -> int:
    """The node's statements; returns the number of its result."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return ELEMENTARY[node.target](to, node)


_ROUNDING = {torch.bfloat16: "round_bf16", torch.float16: "round_f16"}


def _result(node: fx.Node) -> Kind:
    return kind_of(node.meta["val"].dtype)


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _math(function: str) -> Emit:
    return lambda to, node: to.apply(function, to.read(node.args[0], Kind.FLOAT))


def _arithmetic(function: str) -> Emit:
    """A function of all operands, computed in the kind of the result."""

    def build(to: Statements, node: fx.Node) -> int:
        kind = _result(node)
        return to.apply(function, *(to.read(a, kind) for a in node.args), kind=kind)

    return build


def _sum(function: str, reverse: bool = False) -> Emit:
    """a ± alpha·b, or b - alpha·a."""

    def build(to: Statements, node: fx.Node) -> int:
        kind = _result(node)
        first, second = (1, 0) if reverse else (0, 1)
        left, right = to.read(node.args[first], kind), to.read(node.args[second], kind)
        alpha = _argument(node, 2, "alpha", 1)
        scaled = right if alpha == 1 else to.apply("mul", right, to.number(alpha, kind), kind=kind)
        return to.apply(function, left, scaled, kind=kind)

    return build


def _comparison(function: str) -> Emit:
    def build(to: Statements, node: fx.Node) -> int:
        dtypes = [a.meta["val"].dtype for a in node.args if isinstance(a, fx.Node)]
        floating = any(d.is_floating_point for d in dtypes) or any(isinstance(a, float) for a in node.args)
        kind = Kind.FLOAT if floating else Kind.INT
        return to.apply(function, to.read(node.args[0], kind), to.read(node.args[1], kind), kind=Kind.BOOL)

    return build


def _logical(function: str) -> Emit:
    return lambda to, node: to.apply(function, *(to.read(a, Kind.BOOL) for a in node.args), kind=Kind.BOOL)


def _clamp(to: Statements, node: fx.Node) -> int:
    kind = _result(node)
    value = to.read(node.args[0], kind)
    low, high = _argument(node, 1, "min", None), _argument(node, 2, "max", None)
    if low is not None:
        value = to.apply("maximum", value, to.read(low, kind), kind=kind)
    return value if high is None else to.apply("minimum", value, to.read(high, kind), kind=kind)


def _cast(to: Statements, node: fx.Node) -> int:
    value = to.read(node.args[0], _result(node))
    rounding = _ROUNDING.get(node.meta["val"].dtype)
    return value if rounding is None else to.apply(rounding, value)


def _power(to: Statements, node: fx.Node) -> int:
    base, exponent = node.args[0], node.args[1]
    x = to.read(base, Kind.FLOAT)
    if exponent == 2:
        return to.apply("square", x)
    if exponent == 3:
        return to.apply("mul", to.apply("square", x), x)
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if isinstance(exponent, int | float) and exponent in named:
        return to.apply(named[exponent], x)
    return to.apply("pow", x, to.read(exponent, Kind.FLOAT))


def _divide_rounding(to: Statements, node: fx.Node) -> int:
    mode, kind = node.kwargs.get("rounding_mode"), _result(node)
    if mode == "floor":
        return to.apply("floor_div", *(to.read(a, kind) for a in node.args), kind=kind)
    quotient = to.apply("div", to.read(node.args[0], Kind.FLOAT), to.read(node.args[1], Kind.FLOAT))
    if mode is None:
        return quotient
    truncated = to.apply("to_int", quotient, kind=Kind.INT)
    return to.apply("to_float", truncated) if kind is Kind.FLOAT else truncated


def _gelu(to: Statements, node: fx.Node) -> int:
    return to.apply(
        "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu", to.read(node.args[0], Kind.FLOAT)
    )


def _expm1(to: Statements, node: fx.Node) -> int:
    """tanh(x / 2) · (exp(x) + 1), which keeps the digits of a small x."""
    x, one = to.read(node.args[0], Kind.FLOAT), to.number(1.0, Kind.FLOAT)
    half = to.apply("tanh", to.apply("mul", x, to.number(0.5, Kind.FLOAT)))
    return to.apply("mul", half, to.apply("add", to.apply("exp", x), one))


def _log1p(to: Statements, node: fx.Node) -> int:
    """log(u) · x / (u - 1) with u = 1 + x as it is rounded, and x where that is 1. Source: Kahan's HP-15C handbook."""
    x, one = to.read(node.args[0], Kind.FLOAT), to.number(1.0, Kind.FLOAT)
    u = to.apply("add", x, one)
    rounded = to.apply("sub", u, one)
    is_lost = to.apply("eq", rounded, to.number(0.0, Kind.FLOAT), kind=Kind.BOOL)
    divisor = to.apply("where", is_lost, one, rounded)
    return to.apply("where", is_lost, x, to.apply("div", to.apply("mul", to.apply("log", u), x), divisor))


def _choice(condition: int, *values: int) -> Emit:
    """Positions of the condition, of the value where it holds, and of the value elsewhere."""

    def build(to: Statements, node: fx.Node) -> int:
        kind = _result(node)
        holds = to.read(node.args[condition], Kind.BOOL)
        return to.apply("where", holds, *(to.read(node.args[i], kind) for i in values), kind=kind)

    return build


def _fill(position: int) -> Emit:
    def build(to: Statements, node: fx.Node) -> int:
        value = node.args[position]
        assert isinstance(value, int | float)
        return to.number(value, _result(node))

    return build


def _reduction(name: str) -> Emit:
    return lambda to, node: to.reduce(name, to.read(node.args[0], Kind.FLOAT))


def _softmax(to: Statements, node: fx.Node) -> int:
    x = to.read(node.args[0], Kind.FLOAT)
    exponential = to.apply("exp", to.apply("sub", x, to.reduce("max", x)))
    return to.apply("div", exponential, to.reduce("sum", exponential))


BITWISE: dict[Any, str] = {
    _aten.bitwise_and.Tensor: "and",
    _aten.bitwise_or.Tensor: "or",
    _aten.bitwise_not.default: "not",
}
_MATH = ("abs", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "erf", "floor", "ceil", "tanh", "sigmoid", "silu")

POINTWISE: dict[Any, Emit] = {
    **{getattr(_aten, name).default: _math(name) for name in (*_MATH, "relu", "reciprocal", "square", "softplus")},
    **{getattr(_aten.mul, o): _arithmetic("mul") for o in ("Tensor", "Scalar")},
    **{getattr(_aten.div, o): _arithmetic("div") for o in ("Tensor", "Scalar")},
    **{getattr(_aten.add, o): _sum("add") for o in ("Tensor", "Scalar")},
    **{getattr(_aten.sub, o): _sum("sub") for o in ("Tensor", "Scalar")},
    **{getattr(_aten.rsub, o): _sum("sub", reverse=True) for o in ("Tensor", "Scalar")},
    **{
        getattr(getattr(_aten, name), o): _comparison(name)
        for name in ("lt", "le", "gt", "ge", "eq", "ne")
        for o in ("Tensor", "Scalar")
    },
    **{getattr(_aten, f"logical_{name}").default: _logical(name) for name in ("and", "or", "not")},
    **{op: _logical(name) for op, name in BITWISE.items()},
    **{getattr(_aten, name).default: _arithmetic(name) for name in ("neg", "maximum", "minimum")},
    **{getattr(_aten.remainder, o): _arithmetic("remainder") for o in ("Tensor", "Scalar")},
    _aten.floor_divide.default: _arithmetic("floor_div"),
    **{getattr(_aten.div, o): _divide_rounding for o in ("Tensor_mode", "Scalar_mode")},
    **{getattr(_aten.pow, o): _power for o in ("Tensor_Scalar", "Tensor_Tensor", "Scalar")},
    _aten.clamp.default: _clamp,
    _aten.clamp_min.default: _clamp,
    _aten.clamp_max.default: _arithmetic("minimum"),
    _aten.expm1.default: _expm1,
    _aten.gelu.default: _gelu,
    _aten.log1p.default: _log1p,
    _aten.where.self: _choice(0, 1, 2),
    **{getattr(_aten.masked_fill, o): _choice(1, 2, 0) for o in ("Scalar", "Tensor")},
    _aten._to_copy.default: _cast,
    _aten.to.dtype: _cast,
}
REDUCTIONS: dict[Any, Emit] = {
    _aten.mean.dim: _reduction("mean"),
    _aten.sum.dim_IntList: _reduction("sum"),
    _aten.amax.default: _reduction("max"),
    _aten.amin.default: _reduction("min"),
    _aten._softmax.default: _softmax,
}
_FILLS: dict[Any, Emit] = {
    _aten.full.default: _fill(1),
    _aten.full_like.default: _fill(1),
    _aten.scalar_tensor.default: _fill(0),
    _aten.zeros_like.default: lambda to, node: to.number(0, _result(node)),
    _aten.ones_like.default: lambda to, node: to.number(1, _result(node)),
}
ELEMENTARY: dict[Any, Emit] = {**POINTWISE, **REDUCTIONS, **_FILLS}
