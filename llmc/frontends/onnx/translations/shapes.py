"""Operators that move elements: shapes, slices, lookups; and those that make tensors from numbers only."""

from typing import Any

import numpy as np
import torch
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from llmc.frontends.onnx.call import Call, Known, Translated, Translations
from llmc.frontends.onnx.constants import constant
from llmc.frontends.onnx.numbers import array, range_of, tidy
from llmc.frontends.onnx.translations.pointwise import number

_LARGEST = (1 << 31) - 1


def _shape(call: Call) -> Translated:
    sizes = list(call.value(0).shape)
    start, end = call.integer("start", 0), call.integer("end", len(sizes))
    return array(sizes[start:end])


def _size(call: Call) -> Translated:
    value = call.value(0)
    return array(value.numel() if isinstance(value, Tensor) else value.size)


def _reshape(call: Call) -> Any:
    x, sizes = call.operand(0), call.integers(1)
    keeps_zero = bool(call.integer("allowzero", 0))
    return x.reshape([x.shape[i] if _is(size, 0) and not keeps_zero else size for i, size in enumerate(sizes)])


def _is(size: Any, value: int) -> bool:
    return not isinstance(size, SymInt) and size == value


def _flatten(call: Call) -> Translated:
    x, axis = call.tensor(0), call.integer("axis", 1)
    axis += x.dim() if axis < 0 else 0
    return x.reshape(x.shape[:axis].numel() if axis else 1, -1)


def _expand(call: Call) -> Any:
    x, sizes = call.operand(0), call.integers(1)
    # Sizes of one leave the tensor's own.
    own = [1] * (len(sizes) - x.ndim) + list(x.shape)
    requested = [1] * (x.ndim - len(sizes)) + sizes
    wanted = [mine if _is(size, 1) else size for mine, size in zip(own, requested, strict=True)]
    return np.broadcast_to(x, wanted) if call.makes_numbers else x.expand(wanted)


def _tile(call: Call) -> Translated:
    return call.tensor(0).repeat(call.integers(1))


def _squeeze(call: Call) -> Any:
    x, axes = call.operand(0), call.axes()
    chosen = [i for i, size in enumerate(x.shape) if _is(size, 1)] if axes is None else [a % x.ndim for a in axes]
    for axis in sorted(chosen, reverse=True):
        call.unless(_is(x.shape[axis], 1), f"it squeezes axis {axis} of {list(x.shape)}")
        x = x.squeeze(axis)
    return x


def _unsqueeze(call: Call) -> Any:
    x, axes = call.operand(0), call.axes() or []
    for axis in sorted(a % (x.ndim + len(axes)) for a in axes):
        x = np.expand_dims(x, axis) if call.makes_numbers else x.unsqueeze(axis)
    return x


def _transpose(call: Call) -> Translated:
    x = call.tensor(0)
    order = call.node.attributes.get("perm") or tuple(reversed(range(x.dim())))
    moved = [axis for axis, source in enumerate(order) if axis != source]
    if not moved:
        return x
    if len(moved) == 2:
        return x.transpose(*moved)
    return _keys_apart(x, order)


def _keys_apart(x: Tensor, order: Any) -> Tensor:
    """A permutation; one that ends by swapping the last two axes in two steps, as attention's keys are turned."""
    before = [*order[:-2], order[-1], order[-2]]
    if x.dim() == 4 and sum(axis != source for axis, source in enumerate(before)) == 2:
        first, second = (axis for axis, source in enumerate(before) if axis != source)
        return x.transpose(first, second).transpose(-2, -1)
    return x.permute(order)


def _concat(call: Call) -> Translated:
    parts = [call.operand(index) for index in range(len(call.inputs)) if call.has(index)]
    axis = call.integer("axis")
    if call.makes_numbers:
        joined = np.concatenate(parts, axis)
        return tidy(joined, joined)
    # The cache in front of a whole sequence is empty.
    filled = [part for part in parts if not _is(part.shape[axis], 0)] or parts[:1]
    return filled[0] if len(filled) == 1 else torch.cat(filled, axis)


def _split(call: Call) -> Translated:
    x, axis = call.tensor(0), call.integer("axis", 0)
    sizes = call.axes("split")
    if sizes is None:
        count, size = len(call.node.outputs), int(x.shape[axis])
        width = -(-size // count)
        sizes = [min(width, size - width * i) for i in range(count)]
    return tuple(torch.split(x, sizes, axis))


def _slice(call: Call) -> Any:
    x = call.operand(0)
    for start, end, axis, step in call.slices():
        if call.makes_numbers:
            window = slice(start, None if step < 0 and end < -x.shape[axis] else end, step)
            x = x[(slice(None),) * (axis % x.ndim) + (window,)]
        else:
            call.unless(step > 0, f"it counts backwards, in steps of {step}")
            x = _cut(x, axis % x.dim(), start, end, step)
    return x


def _cut(x: Tensor, axis: int, start: Any, end: Any, step: int) -> Tensor:
    size: Any = x.shape[axis]
    to_the_end = not isinstance(end, SymInt) and end >= (_LARGEST if isinstance(size, SymInt) else size)
    if _is(start, 0) and step == 1 and (to_the_end or (isinstance(end, SymInt) and statically_known_true(end == size))):
        return x
    index = [slice(None)] * axis + [slice(start, None if to_the_end else end, step)]
    return x[tuple(index)]


def _gather(call: Call) -> Translated:
    axis = call.integer("axis", 0)
    if call.makes_numbers:
        return np.asarray(np.take(call.known(0), call.known(1).astype(np.int64), axis=axis))
    if not isinstance(call.value(0), Tensor) and isinstance(call.value(1), Tensor):
        return torch.nn.functional.embedding(call.tensor(1), call.tensor(0))
    x = call.tensor(0)
    axis %= x.dim()
    index = call.value(1)
    if not isinstance(index, Tensor) and index.ndim == 0:
        return x.select(axis, call.integers(1)[0])
    ids = call.tensor(1)
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return torch.nn.functional.embedding(ids, x)
    return x[(slice(None),) * axis + (ids,)]


def _gather_elements(call: Call) -> Translated:
    return torch.gather(call.tensor(0), call.integer("axis", 0), call.tensor(1))


def _gather_points(call: Call) -> Translated:
    x, points = call.tensor(0), call.tensor(1)
    call.unless(call.integer("batch_dims", 0) == 0, "it gathers by batch")
    return x[tuple(points[..., axis] for axis in range(int(points.shape[-1])))]


def _range(call: Call) -> Translated:
    if call.makes_numbers:
        return range_of(call)
    start, end, step = (number(call.known(index)) for index in range(3))
    tokens = call.positions.shape[1]
    if isinstance(end, SymInt) and (start, step) == (0, 1) and statically_known_true(end == tokens):
        return call.positions.squeeze(0)  # Also in a step of many sequences.
    whole = isinstance(end, SymInt | int)
    return torch.arange(start, end, step, dtype=torch.int64 if whole else torch.float32)


def _filled(call: Call) -> Translated:
    value = call.node.attributes.get("value")
    filling: Known = np.zeros(1, np.float32) if value is None else np.asarray(constant(value)).reshape(-1)
    if call.makes_numbers:
        return np.full(call.integers(0), filling[0])
    dtype = torch.float32 if value is None else call.dtypes.get(value.dtype, value.dtype)
    return torch.full(call.integers(0), filling[0].item(), dtype=dtype)


def _triangle(call: Call) -> Translated:
    diagonal = int(call.integers(1)[0]) if call.has(1) else 0
    return (torch.triu if call.integer("upper", 1) else torch.tril)(call.tensor(0), diagonal)


def _scattered(call: Call) -> Translated:
    call.unless(call.text("reduction", "none") == "none", "it combines what it scatters")
    return torch.scatter(call.tensor(0), call.integer("axis", 0), call.tensor(1), call.tensor(2))


SHAPES: Translations = {
    ("", "Shape"): _shape,
    ("", "Size"): _size,
    ("", "Reshape"): _reshape,
    ("", "Flatten"): _flatten,
    ("", "Expand"): _expand,
    ("", "Tile"): _tile,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Transpose"): _transpose,
    ("", "Concat"): _concat,
    ("", "Split"): _split,
    ("", "Slice"): _slice,
    ("", "Gather"): _gather,
    ("", "GatherElements"): _gather_elements,
    ("", "GatherND"): _gather_points,
    ("", "Range"): _range,
    ("", "ConstantOfShape"): _filled,
    ("", "Trilu"): _triangle,
    ("", "ScatterElements"): _scattered,
}
