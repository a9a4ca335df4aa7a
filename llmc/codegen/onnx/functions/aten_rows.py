"""aten's ops that make new tensors, reduce axes or multiply: what is left of them in captured and canonical graphs."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from llmc.codegen.onnx.function_body import Body, Value, standard

aten = torch.ops.aten


def reduction(op: str) -> Any:
    """The function of a reduction over some axes."""

    def build(b: Body, self: Value, dim: Sequence[int] | None, keepdim: bool, result: Value) -> str:
        axes = None if not dim else b.integers(list(dim))
        return b(op, b.cast(self, result.dtype), axes, keepdims=int(keepdim))

    return build


def softmax(b: Body, self: Value, dim: int) -> str:
    """Softmax."""
    return b("Softmax", b.cast(self, torch.float32), axis=dim)


def max_of_axis(b: Body, self: Value, dim: int, keepdim: bool) -> tuple[str, str]:
    """The largest elements, and where they are: the first of equals."""
    index = b("ArgMax", self, axis=dim, keepdims=int(keepdim))
    return b("ReduceMax", self, b.integers([dim]), keepdims=int(keepdim)), index


def argmax(b: Body, self: Value, dim: int, keepdim: bool) -> str:
    """ArgMax, the first of equals."""
    return b("ArgMax", self, axis=dim, keepdims=int(keepdim))


def clamp(b: Body, self: Value, min: Value | None, max: Value | None, result: Value) -> str:
    """Limit each element to the elements of two other tensors."""
    bounded = b.cast(self, result.dtype)
    if min is not None:
        bounded = b("Max", bounded, b.cast(min, result.dtype))
    return b("Identity", bounded) if max is None else b("Min", bounded, b.cast(max, result.dtype))


def scatter(b: Body, self: Value, dim: int, index: Value, value: float, result: Value) -> str:
    """ScatterElements of one number."""
    updates = b("Expand", _number(b, value, result), b("Shape", index))
    return b("ScatterElements", self, b.cast(index, torch.int64), updates, axis=dim)


def cast_as(b: Body, self: Value, result: Value) -> str:
    """Cast to the dtype of another tensor."""
    return b.cast(self, result.dtype)


def cumsum(b: Body, self: Value, dim: int, result: Value) -> str:
    """CumSum."""
    return b("CumSum", b.cast(self, result.dtype), b.integer(dim))


def topk(b: Body, self: Value, k: int, dim: int, largest: bool) -> tuple[str, ...]:
    """TopK."""
    return b.several("TopK", 2, self, b.integers([k]), axis=dim, largest=int(largest))


def erfc(b: Body, self: Value) -> str:
    """1 - erf(x)."""
    return b("Sub", b.number(1.0), b("Erf", self))


def variance(
    b: Body, self: Value, dim: Sequence[int], keepdim: bool, correction: float | None = None, unbiased: bool = True
) -> str:
    """Mean of squared differences from the mean; correction: what is taken from the count, 1 for None if unbiased."""
    axes = [d % len(self.shape) for d in dim]
    count = math.prod(map(self.size, axes))
    centred = b("Sub", self, b("ReduceMean", self, b.integers(axes), keepdims=1))
    total = b("ReduceSum", b("Mul", centred, centred), b.integers(axes), keepdims=int(keepdim))
    return b("Div", total, b.number(count - (unbiased if correction is None else correction)))


def linear(b: Body, input: Value, weight: Value, bias: Value | None) -> str:
    """x·weightᵀ + bias."""
    y = b("MatMul", input, b.transpose(weight, 1, 0))
    return y if bias is None else b("Add", y, bias)


def addmm(b: Body, self: Value, mat1: Value, mat2: Value, beta: float, alpha: float) -> str:
    """Gemm."""
    return b("Gemm", mat1, mat2, self, alpha=float(alpha), beta=float(beta))


def baddbmm(b: Body, self: Value, batch1: Value, batch2: Value, beta: float, alpha: float) -> str:
    """beta·self + alpha·batch1·batch2."""
    product = b("MatMul", batch1, batch2)
    scaled = product if alpha == 1 else b("Mul", product, b.number(alpha))
    return b("Add", self if beta == 1 else b("Mul", self, b.number(beta)), scaled)


def einsum(b: Body, equation: str, tensors: Sequence[Value]) -> str:
    """Einsum."""
    return b("Einsum", *tensors, equation=equation)


def layer_norm(
    b: Body, input: Value, normalized_shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> str:
    """LayerNormalization over the last axes."""
    ones = weight or b("Expand", b.number(1.0), b.integers(list(normalized_shape)))
    return b("LayerNormalization", input, ones, bias, axis=-len(normalized_shape), epsilon=eps)


def rms_norm(b: Body, input: Value, normalized_shape: Sequence[int], weight: Value | None, eps: float | None) -> str:
    """RMSNormalization over the last axes."""
    ones = weight or b("Expand", b.number(1.0), b.integers(list(normalized_shape)))
    epsilon = torch.finfo(input.dtype).eps if eps is None else eps
    return b("RMSNormalization", input, ones, axis=-len(normalized_shape), epsilon=epsilon)


def full(
    b: Body, fill_value: float, result: Value, size: Sequence[int | Value] | None = None, self: Value | None = None
) -> str:
    """A number, expanded to a size or, where none is given, to a tensor's shape."""
    return b("Expand", _number(b, fill_value, result), b("Shape", self) if size is None else b.sizes(size))


def scalar_tensor(b: Body, s: float, result: Value) -> str:
    """A constant."""
    return b("Identity", _number(b, s, result))


def arange(b: Body, end: int | Value, result: Value, start: int | Value = 0, step: int = 1) -> str:
    """Range."""
    bounds = (b.integer(int(bound)) if isinstance(bound, int | float) else bound for bound in (start, end, step))
    whole = b("Range", *bounds)
    return whole if result.dtype is torch.int64 else b.cast(whole, result.dtype)


def bitwise(of_bools: str, of_integers: str) -> Any:
    """The function of an operator on bits, of bools or of integers."""

    def build(b: Body, self: Value, other: Value) -> str:
        return b(of_bools if self.dtype is torch.bool else of_integers, self, other)

    return build


def _number(b: Body, value: float, result: Value) -> str:
    if result.dtype.is_floating_point:
        return b.number(value)
    return b.integer(int(value)) if result.dtype is torch.int64 else b.cast(b.integer(int(value)), result.dtype)


FUNCTIONS: dict[Any, Any] = {
    aten.mean.dim: reduction("ReduceMean"),
    aten.sum.dim_IntList: reduction("ReduceSum"),
    aten.amax.default: reduction("ReduceMax"),
    aten.amin.default: reduction("ReduceMin"),
    **dict.fromkeys((aten._softmax.default, aten.softmax.int, aten._safe_softmax.default), softmax),
    aten.max.dim: max_of_axis,
    aten.argmax.default: argmax,
    aten.clamp.Tensor: clamp,
    aten.scatter.value: scatter,
    aten.type_as.default: cast_as,
    aten.cumsum.default: cumsum,
    aten.topk.default: topk,
    aten.erfc.default: erfc,
    aten.var.correction: variance,
    aten.var.dim: variance,
    aten.linear.default: linear,
    aten.addmm.default: addmm,
    aten.baddbmm.default: baddbmm,
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default), standard("MatMul")),
    aten.einsum.default: einsum,
    aten.layer_norm.default: layer_norm,
    aten.rms_norm.default: rms_norm,
    **dict.fromkeys((aten.full.default, aten.new_full.default, aten.full_like.default), full),
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), partial(full, fill_value=0)),
    **dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), partial(full, fill_value=1)),
    aten.scalar_tensor.default: scalar_tensor,
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), arange),
    aten.__and__.Tensor: bitwise("And", "BitwiseAnd"),
    aten.__or__.Tensor: bitwise("Or", "BitwiseOr"),
}
