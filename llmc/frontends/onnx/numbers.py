"""Sizes and other known numbers, which graphs compute node by node; T among them is a SymInt.

Translations compute them in numpy, by the same functions as tensors, so that the graph holds no trace of it. A question
that numpy cannot answer about T, such as whether it is 7, is refused; that a size differs from -1 is known.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from llmc.frontends.onnx.call import Call, Known

_MOST = 1 << 16
# Operators whose translations also take known numbers, and give some.
_OF_NUMBERS = (
    "Add Sub Mul Div Mod Pow Neg Max Min Abs Sqrt Reciprocal Floor Ceil Exp Log Not And Or Equal Less LessOrEqual "
    "Greater GreaterOrEqual Cast Gather Concat Slice Reshape Squeeze Unsqueeze ReduceProd ReduceSum ReduceMax "
    "ReduceMin Where ConstantOfShape Expand Range Identity"
)


def array(numbers: Any) -> Known:
    """The numbers as int64, or as objects if T is among them."""
    values = np.asarray(numbers, dtype=object)
    if any(isinstance(element, SymInt) for element in values.reshape(-1)):
        return values
    return np.asarray(values.tolist(), dtype=np.int64).reshape(values.shape)


def tidy(values: Any, like: Known) -> Known:
    """The numbers, of like's dtype where T is no longer among them."""
    numbers: Known = np.asarray(values)
    if numbers.dtype != object:
        return numbers
    kept = array(numbers)
    return kept if kept.dtype == object or like.dtype == object else kept.astype(like.dtype)


def compared(call: Call, relation: Callable[[Any, Any], Any]) -> Known:
    """Whether the relation holds between two inputs, one by one. Raises CaptureError where that depends on T."""
    first, second = np.broadcast_arrays(call.known(0), call.known(1))
    # Python's numbers: NumPy 1's would be compared with T as they would with its hint.
    pairs = zip(first.reshape(-1).tolist(), second.reshape(-1).tolist(), strict=True)
    truths = [_truth(call, relation(a, b)) for a, b in pairs]
    return np.asarray(truths, dtype=np.bool_).reshape(first.shape)


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


def quotient(first: Any, second: Any) -> Any:
    """The quotient of whole numbers rounded towards zero; with T, no operand is negative."""
    if first.dtype == object or second.dtype == object:
        return first // second
    if np.issubdtype(first.dtype, np.integer):
        return np.trunc(first / second).astype(first.dtype)
    return first / second


def extreme(pick: Callable[[Any, Any], Any], symbolic: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The larger or smaller of each two numbers. symbolic: picks one of T and another number."""

    def picked(first: Known, second: Known) -> Any:
        is_symbolic = first.dtype == object or second.dtype == object
        return array(np.frompyfunc(symbolic, 2, 1)(first, second)) if is_symbolic else pick(first, second)

    return picked


def range_of(call: Call) -> Known:
    """Return the numbers from the first of three to the second in steps of the third. Raises CaptureError for too
    many."""
    start, end, step = (call.known(index).reshape(-1)[0] for index in range(3))
    count = math.ceil((end - start) / step)
    call.unless(count <= _MOST, f"it makes known numbers of shape [{count}]")
    numbers: Known = np.arange(start, end, step)
    return numbers


def makes_numbers(call: Call) -> bool:
    """Whether a call's inputs are known numbers, and its result too: few of them."""
    op, values = call.node.op_type, call.inputs
    if call.node.domain or op not in _OF_NUMBERS.split() or any(isinstance(value, Tensor) for value in values):
        return False
    sizes: list[Any] = []
    if op == "ConstantOfShape":
        sizes = list(values[0].reshape(-1)) if isinstance(values[0], np.ndarray) else [_MOST + 1]
    elif op == "Expand" and isinstance(values[1], np.ndarray):
        sizes = list(values[1].reshape(-1))
    elif op == "Range":
        return not any(isinstance(v, np.ndarray) and v.dtype == object for v in values)
    return not any(isinstance(size, SymInt) for size in sizes) and math.prod(max(int(s), 0) for s in sizes) <= _MOST
