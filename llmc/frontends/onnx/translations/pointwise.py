"""Operators on elements: arithmetic, comparisons, activations, casts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llmc.frontends.onnx.call import Call, Translated, Translations, Value, as_tensor, torch_dtype
from llmc.frontends.onnx.constants import NUMPY_DTYPES
from llmc.frontends.onnx.numbers import compared, extreme, quotient, tidy
from llmc.frontends.onnx.tensors import DTYPES


def operands(call: Call) -> list[Any]:
    """All inputs of a call. Next to tensors, a single known number becomes a Python number."""
    if call.makes_numbers:
        return [call.known(index) for index in range(len(call.inputs))]
    values = [call.value(index) for index in range(len(call.inputs))]
    axes = max((v.dim() for v in values if isinstance(v, Tensor)), default=0)
    return [_operand(value, axes) for value in values]


def _operand(value: Value, axes: int) -> Any:
    if isinstance(value, Tensor) or value.size != 1 or value.ndim > axes:
        return as_tensor(value)
    return number(value)


def number(value: Any) -> Any:
    """The number in an array of one element; whole numbers become integers, which patterns of powers match."""
    scalar = value.reshape(-1)[0]
    return scalar.item() if hasattr(scalar, "item") else scalar


def _pair(apply: Callable[[Any, Any], Any]) -> Callable[[Call], Translated]:
    def translate(call: Call) -> Translated:
        first, second = operands(call)
        result: Any = apply(first, second)
        return tidy(result, first) if call.makes_numbers else result

    return translate


def _compared(relation: Callable[[Any, Any], Any]) -> Callable[[Call], Translated]:
    plain = _pair(relation)
    return lambda call: compared(call, relation) if call.makes_numbers else plain(call)


def _single(apply: Callable[[Tensor], Tensor], of_numbers: Callable[[Any], Any] | None = None) -> Any:
    def translate(call: Call) -> Translated:
        x = call.operand(0)
        if not call.makes_numbers:
            return apply(x)
        if of_numbers is None or (x.dtype == object and of_numbers is not np.negative):
            raise call.refused("it is computed of the number of tokens")
        return tidy(of_numbers(x), x)

    return translate


def _divided(first: Any, second: Any) -> Any:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return quotient(first, second)
    whole = [operand for operand in (first, second) if isinstance(operand, Tensor)]
    if not whole[0].is_floating_point():
        return torch.div(first, second, rounding_mode="trunc")
    return torch.reciprocal(second) if not isinstance(first, Tensor) and first == 1 else first / second


def _remainder(call: Call) -> Translated:
    first, second = operands(call)
    if call.makes_numbers:
        return tidy(first % second, first)
    result: Tensor = (torch.fmod if call.integer("fmod", 0) else torch.remainder)(first, second)
    return result


def _power(call: Call) -> Translated:
    base, exponent = operands(call)
    if call.makes_numbers:
        return tidy(base**exponent, base)
    if not isinstance(exponent, Tensor) and float(exponent).is_integer():
        exponent = int(exponent)
    result: Tensor = torch.pow(base, exponent)
    return result


def _of_all(
    combine: Callable[[Tensor, Tensor], Tensor], of_numbers: Callable[[Any, Any], Any] = np.add
) -> Callable[[Call], Translated]:
    def translate(call: Call) -> Any:
        result, *others = (call.operand(index) for index in range(len(call.inputs)))
        for other in others:
            result = np.asarray(of_numbers(result, other)) if call.makes_numbers else combine(result, other)
        return result

    return translate


def _where(call: Call) -> Translated:
    condition, first, second = operands(call)
    if call.makes_numbers:
        return tidy(np.where(condition.astype(np.bool_), first, second), first)
    sides = [first, second]
    dtype = next((side.dtype for side in sides if isinstance(side, Tensor)), None)
    for index, side in enumerate(sides):
        if not isinstance(side, Tensor):
            sides[index] = torch.full((), side, dtype=dtype or torch_dtype(call.known(index + 1)))
    return torch.where(condition, *sides)


def _cast(call: Call) -> Any:
    x, wanted = call.operand(0), call.integer("to")
    if not call.makes_numbers:
        return cast(call, x, wanted)
    dtype = DTYPES.get(wanted)
    if dtype is None:
        raise call.refused(f"it casts to ONNX type {wanted}")
    if x.dtype == object:
        call.unless(not dtype.is_floating_point and dtype is not torch.bool, f"the number of tokens becomes {dtype}")
        return x
    return x.astype(NUMPY_DTYPES[dtype])


def cast(call: Call, x: Tensor, number: int) -> Tensor:
    """x in a type of ONNX's."""
    dtype = DTYPES.get(number)
    if dtype is None:
        raise call.refused(f"it casts to ONNX type {number}, which engines do not have")
    return x.to(call.dtypes.get(dtype, dtype))


def _clip(call: Call) -> Translated:
    bounds: list[Any] = []
    for index, name in ((1, "min"), (2, "max")):
        bound = call.node.attributes.get(name)
        bounds.append(number(call.known(index)) if call.has(index) else bound)
    return torch.clamp(call.tensor(0), *bounds)


def _gelu(call: Call) -> Translated:
    return functional.gelu(call.tensor(0), approximate=call.text("approximate", "none"))


def _biased_gelu(approximate: str) -> Callable[[Call], Translated]:
    def translate(call: Call) -> Translated:
        bias = call.optional(1)
        return functional.gelu(call.tensor(0) if bias is None else call.tensor(0) + bias, approximate=approximate)

    return translate


def _quick_gelu(call: Call) -> Translated:
    x = call.tensor(0)
    return x * torch.sigmoid(x * call.real("alpha", 1.702))


def _leaky(call: Call) -> Translated:
    return functional.leaky_relu(call.tensor(0), call.real("alpha", 0.01))


_MICROSOFT = "com.microsoft"
# The names in torch and ONNX differ only in the capital letter.
_NAMED_ALIKE = "Sin Cos Erf Tanh Sigmoid Relu"
_IN_NUMPY_TOO = "Abs Exp Log Sqrt Reciprocal Floor Ceil"
POINTWISE: Translations = {
    ("", "Add"): _pair(lambda a, b: a + b),
    ("", "Sub"): _pair(lambda a, b: a - b),
    ("", "Mul"): _pair(lambda a, b: a * b),
    ("", "Div"): _pair(_divided),
    ("", "Mod"): _remainder,
    ("", "Pow"): _power,
    ("", "Max"): _of_all(torch.maximum, extreme(np.maximum, torch.sym_max)),
    ("", "Min"): _of_all(torch.minimum, extreme(np.minimum, torch.sym_min)),
    ("", "Sum"): _of_all(torch.add),
    ("", "Equal"): _compared(lambda a, b: a == b),
    ("", "Less"): _compared(lambda a, b: a < b),
    ("", "LessOrEqual"): _compared(lambda a, b: a <= b),
    ("", "Greater"): _compared(lambda a, b: a > b),
    ("", "GreaterOrEqual"): _compared(lambda a, b: a >= b),
    ("", "And"): _of_all(torch.bitwise_and, np.logical_and),
    ("", "Or"): _of_all(torch.bitwise_or, np.logical_or),
    ("", "Not"): _single(torch.logical_not, np.logical_not),
    ("", "Neg"): _single(torch.neg, np.negative),
    **{
        ("", name): _single(*(getattr(library, name.lower()) for library in (torch, np)))
        for name in _IN_NUMPY_TOO.split()
    },
    **{("", name): _single(getattr(torch, name.lower())) for name in _NAMED_ALIKE.split()},
    ("", "Softplus"): _single(functional.softplus),
    ("", "LeakyRelu"): _leaky,
    ("", "Gelu"): _gelu,
    # Values of masked scores and their sums: a row that sees itself has no such value.
    ("", "IsNaN"): _single(torch.isnan),
    ("", "Identity"): lambda call: call.value(0),
    ("", "Dropout"): lambda call: call.value(0),
    ("", "Where"): _where,
    ("", "Clip"): _clip,
    ("", "Cast"): _cast,
    ("", "CastLike"): lambda call: call.tensor(0).to(call.tensor(1).dtype),
    (_MICROSOFT, "Gelu"): _biased_gelu("none"),
    (_MICROSOFT, "BiasGelu"): _biased_gelu("none"),
    (_MICROSOFT, "FastGelu"): _biased_gelu("tanh"),
    (_MICROSOFT, "QuickGelu"): _quick_gelu,
}
