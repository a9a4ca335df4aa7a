"""Operators along axes: sums, means, softmax, the largest."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmc.frontends.onnx.call import Call, Translated, Translations
from llmc.frontends.onnx.numbers import tidy


def _reduced(reduce: Callable[..., Any] | None, of_numbers: Any = None) -> Callable[[Call], Translated]:
    def translate(call: Call) -> Any:
        x, axes, keeps = call.operand(0), call.axes(), bool(call.integer("keepdims", 1))
        if not axes and call.integer("noop_with_empty_axes", 0):
            return x
        along = sorted(a % x.ndim for a in axes) if axes else list(range(x.ndim))
        if call.makes_numbers:
            return tidy(of_numbers(x, axis=tuple(along), keepdims=keeps), x)
        if reduce is None:
            raise call.refused("it is computed while the model runs")
        result: Tensor = reduce(x, along, keeps)
        return result

    return translate


def _mean(x: Tensor, axes: list[int], keeps: bool) -> Tensor:
    """Take the mean. The last axis is counted from the end, as in patterns."""
    return torch.mean(x, [-1] if axes == [x.dim() - 1] else axes, keeps)


def _cumulative(call: Call) -> Translated:
    call.unless(
        not call.integer("exclusive", 0) and not call.integer("reverse", 0), "it sums exclusively, or backwards"
    )
    return torch.cumsum(call.tensor(0), int(call.integers(1)[0]))


def _softmax(call: Call) -> Translated:
    x = call.tensor(0)
    axis = call.integer("axis", -1 if call.opset >= 13 else 1) % x.dim()
    call.unless(call.opset >= 13 or axis == x.dim() - 1, f"softmax of opset {call.opset} over several axes")
    return torch.softmax(x, axis)


def _top(call: Call) -> Translated:
    call.unless(bool(call.integer("largest", 1)), "it looks for the smallest")
    x = call.tensor(0)
    return tuple(torch.topk(x, int(call.integers(1)[0]), call.integer("axis", -1)))


def _last_largest(call: Call) -> Translated:
    return torch.argmax(call.tensor(0), call.integer("axis", 0), bool(call.integer("keepdims", 1)))


REDUCTIONS: Translations = {
    ("", "ReduceMean"): _reduced(_mean),
    ("", "ReduceSum"): _reduced(torch.sum, np.sum),
    ("", "ReduceMax"): _reduced(torch.amax, np.max),
    ("", "ReduceMin"): _reduced(torch.amin, np.min),
    ("", "ReduceProd"): _reduced(None, np.prod),
    ("", "CumSum"): _cumulative,
    ("", "Softmax"): _softmax,
    ("", "TopK"): _top,
    ("", "ArgMax"): _last_largest,
}
