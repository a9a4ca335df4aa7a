"""Arithmetic of sizes and other known numbers, which graphs write out node by node; T in it is a SymInt.

It is done here, in numpy, so that no trace of it is left in the graph. What numpy cannot say of T, such as whether it
is 7, is refused; that a size differs from -1 can be said.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import SymInt
from torch.fx.experimental.symbolic_shapes import statically_known_true

from llmc.frontends.onnx.call import Call, Known
from llmc.frontends.onnx.constants import NUMPY_DTYPES, constant
from llmc.frontends.onnx.tensors import DTYPES

_MOST = 1 << 16
Arithmetic = Callable[[Call], Known | tuple[Known, ...]]


def array(numbers: Any) -> Known:
    """An array of objects if T is among the numbers."""
    found = np.asarray(numbers, dtype=object)
    flat = found.reshape(-1)
    if any(isinstance(each, SymInt) for each in flat):
        return found
    return np.asarray(found.tolist(), dtype=np.int64).reshape(found.shape)


def _pair(apply: Callable[[Any, Any], Any]) -> Arithmetic:
    def computed(call: Call) -> Known:
        return tidy(np.asarray(apply(call.known(0), call.known(1))), call.known(0))

    return computed


def _single(apply: Callable[[Any], Any]) -> Arithmetic:
    def computed(call: Call) -> Known:
        x = call.known(0)
        if x.dtype == object:
            raise call.refused("it is computed of the number of tokens")
        return tidy(np.asarray(apply(x)), x)

    return computed


def tidy(found: Known, like: Known) -> Known:
    """Numbers of like's dtype where T is not among them."""
    if found.dtype != object:
        return found
    kept = array(found)
    return kept if kept.dtype == object or like.dtype == object else kept.astype(like.dtype)


def _compared(relation: Callable[[Any, Any], Any]) -> Arithmetic:
    def computed(call: Call) -> Known:
        first, second = np.broadcast_arrays(call.known(0), call.known(1))
        # Python's numbers: NumPy 1's would be compared with T as they would with its hint.
        pairs = zip(first.reshape(-1).tolist(), second.reshape(-1).tolist(), strict=True)
        found = [_truth(call, relation(a, b)) for a, b in pairs]
        return np.asarray(found, dtype=np.bool_).reshape(first.shape)

    return computed


def _truth(call: Call, condition: Any) -> bool:
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    if statically_known_true(condition):
        return True
    if statically_known_true(torch.sym_not(condition)):
        return False
    raise call.refused(
        f"whether {condition} depends on the number of tokens",
        "build it for sequences that are all of one side, such as --max-model-len 4096 for those up to 4096 tokens",
    )


def _quotient(first: Any, second: Any) -> Any:
    """Of whole numbers rounded towards zero; none of them is negative where T is among them."""
    if first.dtype == object or second.dtype == object:
        return first // second
    if np.issubdtype(first.dtype, np.integer):
        return np.trunc(first / second).astype(first.dtype)
    return first / second


def _extreme(pick: Callable[[Any, Any], Any], symbolic: Callable[[Any, Any], Any]) -> Arithmetic:
    def computed(call: Call) -> Known:
        found = call.known(0)
        for index in range(1, len(call.inputs)):
            other = call.known(index)
            if found.dtype == object or other.dtype == object:
                found = array(np.frompyfunc(symbolic, 2, 1)(found, other))
            else:
                found = np.asarray(pick(found, other))
        return found

    return computed


def _cast(call: Call) -> Known:
    x, dtype = call.known(0), DTYPES.get(call.integer("to"))
    call.unless(dtype is not None, f"it casts to ONNX type {call.integer('to')}")
    assert dtype is not None
    if x.dtype == object:
        call.unless(not dtype.is_floating_point and dtype is not torch.bool, f"the number of tokens becomes {dtype}")
        return x
    return x.astype(NUMPY_DTYPES[dtype])


def _gather(call: Call) -> Known:
    return np.asarray(np.take(call.known(0), call.known(1).astype(np.int64), axis=call.integer("axis", 0)))


def _concat(call: Call) -> Known:
    parts = [call.known(index) for index in range(len(call.inputs))]
    found = np.concatenate(parts, axis=call.integer("axis"))
    return array(found) if found.dtype == object else found


def _slice(call: Call) -> Known:
    x = call.known(0)
    for start, end, axis, step in call.slices():
        window = slice(start, None if step < 0 and end < -x.shape[axis] else end, step)
        x = x[(slice(None),) * (axis % x.ndim) + (window,)]
    return x


def _reshape(call: Call) -> Known:
    sizes = call.integers(1)
    return call.known(0).reshape([call.known(0).shape[i] if size == 0 else size for i, size in enumerate(sizes)])


def _squeeze(call: Call) -> Known:
    axes = call.axes()
    return np.squeeze(call.known(0), None if axes is None else tuple(axes))


def _unsqueeze(call: Call) -> Known:
    return np.expand_dims(call.known(0), tuple(call.axes() or ()))


def _reduced(reduce: Callable[..., Any]) -> Arithmetic:
    def computed(call: Call) -> Known:
        axes = call.axes()
        keeps = bool(call.integer("keepdims", 1))
        x = call.known(0)
        return tidy(np.asarray(reduce(x, axis=None if axes is None else tuple(axes), keepdims=keeps)), x)

    return computed


def _where(call: Call) -> Known:
    first, second = call.known(1), call.known(2)
    return tidy(np.where(call.known(0).astype(np.bool_), first, second), first)


def _filled(call: Call) -> Known:
    value = call.node.attributes.get("value")
    number = np.zeros(1, np.float32) if value is None else np.asarray(constant(value)).reshape(1)
    return np.full(call.integers(0), number[0])


def _expand(call: Call) -> Known:
    wanted = np.broadcast_shapes(call.known(0).shape, tuple(call.integers(1)))
    return np.broadcast_to(call.known(0), wanted)


def _range(call: Call) -> Known:
    start, end, step = (call.known(index).reshape(-1)[0] for index in range(3))
    count = math.ceil((end - start) / step)
    call.unless(count <= _MOST, f"it makes known numbers of shape [{count}]")
    return np.arange(start, end, step)


def is_small(call: Call) -> bool:
    """Whether all inputs of a call that makes numbers are known, and few."""
    op, values = call.node.op_type, call.inputs
    sizes: list[Any] = []
    if op == "ConstantOfShape":
        sizes = list(values[0].reshape(-1)) if isinstance(values[0], np.ndarray) else [_MOST + 1]
    elif op == "Expand" and isinstance(values[1], np.ndarray):
        sizes = list(values[1].reshape(-1))
    elif op == "Range":
        return not any(isinstance(v, np.ndarray) and v.dtype == object for v in values)
    return not any(isinstance(size, SymInt) for size in sizes) and math.prod(max(int(s), 0) for s in sizes) <= _MOST


ARITHMETIC: Mapping[str, Arithmetic] = MappingProxyType(
    {
        "Add": _pair(lambda a, b: a + b),
        "Sub": _pair(lambda a, b: a - b),
        "Mul": _pair(lambda a, b: a * b),
        "Div": _pair(_quotient),
        "Mod": _pair(lambda a, b: a % b),
        "Pow": _pair(lambda a, b: a**b),
        "Neg": lambda call: tidy(np.asarray(-call.known(0)), call.known(0)),
        "Max": _extreme(np.maximum, torch.sym_max),
        "Min": _extreme(np.minimum, torch.sym_min),
        "Abs": _single(np.abs),
        "Sqrt": _single(np.sqrt),
        "Reciprocal": _single(np.reciprocal),
        "Floor": _single(np.floor),
        "Ceil": _single(np.ceil),
        "Exp": _single(np.exp),
        "Log": _single(np.log),
        "Not": _single(np.logical_not),
        "And": _pair(np.logical_and),
        "Or": _pair(np.logical_or),
        "Equal": _compared(lambda a, b: a == b),
        "Less": _compared(lambda a, b: a < b),
        "LessOrEqual": _compared(lambda a, b: a <= b),
        "Greater": _compared(lambda a, b: a > b),
        "GreaterOrEqual": _compared(lambda a, b: a >= b),
        "Cast": _cast,
        "Gather": _gather,
        "Concat": _concat,
        "Slice": _slice,
        "Reshape": _reshape,
        "Squeeze": _squeeze,
        "Unsqueeze": _unsqueeze,
        "ReduceProd": _reduced(np.prod),
        "ReduceSum": _reduced(np.sum),
        "ReduceMax": _reduced(np.max),
        "ReduceMin": _reduced(np.min),
        "Where": _where,
        "ConstantOfShape": _filled,
        "Expand": _expand,
        "Range": _range,
        "Identity": lambda call: call.known(0),
    }
)
