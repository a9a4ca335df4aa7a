"""Fuse the rotation of queries and keys into llmc.rope.

    x · C + cat([-x[half:], x[:half]]) · S, with C = unsqueeze(cat([cos, cos])), S likewise   →  rope(x, cos, sin)
    x · C + pairs([-x[1::2], x[0::2]]) · S, with C = unsqueeze(each of cos twice)              →  interleaved rope
    x · C + cat([x[half:], -x[:half]]) · S                                                     →  rope(x, cos, -sin)
    cat([a·C - b·S, b·C + a·S]), with a, b = x[:half], x[half:] and C = unsqueeze(cos)         →  rope(x, cos, sin)
    the same with a, b = x[0::2], x[1::2]                                       →  rope(cat([a, b]), cos, sin)
    cat([rope(x[:rotary], cos, sin), x[rotary:]])                                              →  rope(x, cos, sin)
Must have: x of three axes, tokens and heads in either order, given by C's axis of size 1; one angle per pair of rotated
channels. x of [heads, tokens, channels] is transposed around the op.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from llmc.graph.refusal import Refusal, Refused
from llmc.graph.stage import Stage
from llmc.passes.match import Match
from llmc.passes.pattern import either
from llmc.passes.rewrite import Numerics, Rewrite
from llmc.passes.shapes import same_shape

aten = torch.ops.aten


def rotate_half(
    x: Any, cos: Any, sin: Any, axis: Any, dtype: Any, wide: Any, before: Any, start: Any, middle: Any, end: Any
) -> Any:
    """transformers' rotate_half; ModernBERT widens x before, ERNIE 4.5 after."""
    first, second = (
        aten._to_copy.default(aten.slice.Tensor(x, -1, *ends), dtype=before)
        for ends in ((start, middle), (middle, end))
    )
    turned = aten.cat.default([aten.neg.default(second), first], -1)
    return _with_turned(x, turned, _twice(cos, dtype), _twice(sin, dtype), axis, wide)


def rotate_back(x: Any, cos: Any, sin: Any, axis: Any, dtype: Any, wide: Any, start: Any, middle: Any, end: Any) -> Any:
    """nanochat's, the other way around."""
    front = aten.neg.default(aten.slice.Tensor(x, -1, start, middle))
    turned = aten.cat.default([aten.slice.Tensor(x, -1, middle, end), front], -1)
    return _with_turned(x, turned, _twice(cos, dtype), _twice(sin, dtype), axis, wide)


def _twice(half: Any, dtype: Any) -> Any:
    return aten._to_copy.default(aten.cat.default([half, half], -1), dtype=dtype)


def _with_turned(x: Any, turned: Any, cos: Any, sin: Any, axis: Any, wide: Any) -> Any:
    x, turned = (aten._to_copy.default(y, dtype=wide) for y in (x, turned))
    pairs = _spread(cos, sin, axis)
    return either(*(aten.add.Tensor(aten.mul.Tensor(x, c), aten.mul.Tensor(turned, s)) for c, s in pairs))


def rotate_pairs(
    x: Any, cos: Any, sin: Any, axis: Any, dtype: Any, width: Any, wide: Any, flat: Any, end: Any, last: Any
) -> Any:
    """GPT-J's and Cohere's, of neighbouring channels."""
    pairs = (aten.reshape.default(aten.stack.default([half, half], -1), width) for half in (cos, sin))
    cos, sin = (aten._to_copy.default(table, dtype=dtype) for table in pairs)
    odd = aten.neg.default(aten.slice.Tensor(x, -1, 1, end, 2))
    turned = aten.reshape.default(aten.stack.default([odd, aten.slice.Tensor(x, -1, 0, last, 2)], -1), flat)
    return _with_turned(x, turned, cos, sin, axis, wide)


def split_halves(x: Any, cos: Any, sin: Any, axis: Any, dtype: Any, start: Any, middle: Any, end: Any) -> Any:
    """Match a rotation of both halves separately."""
    a, b = aten.slice.Tensor(x, -1, start, middle), aten.slice.Tensor(x, -1, middle, end)
    return either(*(aten.cat.default(pair, -1) for pair in _turned(a, b, cos, sin, axis, dtype)))


def pairs_to_halves(x: Any, cos: Any, sin: Any, axis: Any, dtype: Any, end: Any, last: Any) -> Any:
    """Match a rotation of even and odd channels whose results stay separate, as in DeepSeek and similar models."""
    a, b = aten.slice.Tensor(x, -1, 0, last, 2), aten.slice.Tensor(x, -1, 1, end, 2)
    return either(*(aten.cat.default(pair, -1) for pair in _turned(a, b, cos, sin, axis, dtype)))


def split_pairs(x: Any, cos: Any, sin: Any, axis: Any, dtype: Any, flat: Any, end: Any, last: Any) -> Any:
    """Match a rotation of even and odd channels whose results are interleaved again."""
    a, b = aten.slice.Tensor(x, -1, 0, last, 2), aten.slice.Tensor(x, -1, 1, end, 2)
    return aten.reshape.default(
        either(*(aten.stack.default(pair, -1) for pair in _turned(a, b, cos, sin, axis, dtype))), flat
    )


def _spread(cos: Any, sin: Any, axis: Any) -> Iterator[tuple[Any, Any]]:
    """Yield cosines and sines over the heads, by an axis of size 1 or, if that is the first axis, without it."""
    yield aten.unsqueeze.default(cos, axis), aten.unsqueeze.default(sin, axis)
    yield cos, sin


def _turned(a: Any, b: Any, cos: Any, sin: Any, axis: Any, dtype: Any) -> Iterator[list[Any]]:
    cos, sin = (aten._to_copy.default(angles, dtype=dtype) for angles in (cos, sin))
    for c, s in _spread(cos, sin, axis):
        first = aten.sub.Tensor(aten.mul.Tensor(a, c), aten.mul.Tensor(b, s))
        yield [first, aten.add.Tensor(aten.mul.Tensor(b, c), aten.mul.Tensor(a, s))]


def _precondition(match: Match) -> None:
    x, cos, sin = (match.tensor(name) for name in ("x", "cos", "sin"))
    axis = match.bound.get("axis", 0)
    if x.dim() != 3:
        raise Refused(f"x has {x.dim()} axes {list(x.shape)}, expected heads, tokens and channels", match.root)
    result = match.root.meta["val"]
    if not same_shape(result.shape, x.shape):
        raise Refused(f"x {list(x.shape)} is broadcast to {list(result.shape)}", match.root)
    if cos.dim() != 2 or sin.shape != cos.shape:
        raise Refused(f"cos is {list(cos.shape)}, sin {list(sin.shape)}, expected [tokens, angles]", match.root)
    if axis not in (0, 1):
        raise Refused(f"the angles are broadcast along axis {axis}, expected 0 or 1", match.root)
    if result.dtype not in (x.dtype, torch.float32):
        raise Refused(f"the rotation returns {result.dtype} but x is {x.dtype}", match.root)
    half, width = cos.shape[-1], x.shape[-1]
    ends = {"start": 0, "middle": half, "end": width, "last": width}
    wrong = {n: match.bound[n] for n, v in ends.items() if n in match.bound and not _is_end(match.bound[n], v, n)}
    if 2 * half != width or wrong:
        raise Refused(f"{half} angles turn {width} channels, split at {wrong or 'the middle'}", match.root)


def _is_end(seen: Any, wanted: int, name: str) -> bool:
    # x[0:width-1:2] is x[0:width:2] for an even width.
    return bool(seen == wanted or (name == "last" and seen == wanted - 1))


def _replacement(x: Any, cos: Any, sin: Any, axis: int | None, flat: Any, last: Any, match: Match) -> Any:
    interleaved = flat is not None
    if last is not None and not interleaved:
        width = match.tensor("x").shape[-1]
        x = aten.cat.default([aten.slice.Tensor(x, -1, first, width, 2) for first in (0, 1)], -1)
    cos, sin = _before_cast(cos), _before_cast(sin)
    result = match.root.meta["val"].dtype
    if match.tensor("x").dtype is not result:
        # bf16 channels times fp32 cosines are fp32; see fuse_rope_casts.
        x = aten._to_copy.default(x, dtype=result)
    if axis == 1:
        return torch.ops.llmc.rope.default(x, cos, sin, interleaved)
    by_token = aten.transpose.int(x, 0, 1)
    return aten.transpose.int(torch.ops.llmc.rope.default(by_token, cos, sin, interleaved), 0, 1)


def _backwards(x: Any, cos: Any, sin: Any, axis: int | None, match: Match) -> Any:
    return _replacement(x, cos, aten.neg.default(_before_cast(sin)), axis, None, None, match)


def _before_cast(angles: fx.Proxy) -> fx.Proxy:
    """Cosines in fp32, where the model rounds them to bf16 before it repeats them."""
    source = angles.node.args[0] if angles.node.target is aten._to_copy.default else angles.node
    return fx.Proxy(source, angles.tracer) if isinstance(source, fx.Node) else angles


def _part_turned(x: Any, cos: Any, sin: Any, interleaved: Any, start: Any, rotary: Any, end: Any) -> Any:
    turned = torch.ops.llmc.rope.default(aten.slice.Tensor(x, -1, start, rotary), cos, sin, interleaved)
    return aten.cat.default([turned, aten.slice.Tensor(x, -1, rotary, end)], -1)


def _part_precondition(match: Match) -> None:
    width, (start, end) = match.tensor("x").shape[-1], (match.bound["start"], match.bound["end"])
    if start != 0 or end != width:
        raise Refused(f"channels {start} to {end} are put together, x has 0 to {width}", match.root)
    if match.root.meta["val"].shape[-1] != width:
        raise Refused(f"{match.root.meta['val'].shape[-1]} channels are put together, x has {width}", match.root)


def _whole(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    return torch.ops.llmc.rope.default(x, cos, sin, interleaved)


def _turned_in_fp32(x: Any, cos: Any, sin: Any, interleaved: Any, dtype: Any) -> Any:
    wide = aten._to_copy.default(x, dtype=torch.float32)
    return aten._to_copy.default(torch.ops.llmc.rope.default(wide, cos, sin, interleaved), dtype=dtype)


def _cast_precondition(match: Match) -> Refusal | None:
    x, dtype = match.tensor("x"), match.bound["dtype"]
    return None if x.dtype is dtype else Refusal(f"the rotation returns {dtype} but x is {x.dtype}", match.root)


_EXAMPLES = tuple(
    {
        **{"x": shape, "cos": (3, 2), "sin": (3, 2), "axis": axis, "width": [3, 4], "flat": list(shape)},
        **{"start": 0, "middle": 2, "end": 4, "last": 4},
    }
    for axis, shape in ((1, (3, 1, 4)), (0, (1, 3, 4)))
)


def _rotation(name: str, replacement: Callable[..., Any], *patterns: Callable[..., Any]) -> Rewrite:
    return Rewrite(name, patterns, replacement, _precondition, Numerics.REORDER, Stage.CAPTURED, examples=_EXAMPLES)


fuse_rope = _rotation("fuse_rope", _replacement, rotate_half, rotate_pairs, split_halves, split_pairs, pairs_to_halves)
fuse_rope_backwards = _rotation("fuse_rope_backwards", _backwards, rotate_back)
fuse_partial_rope = Rewrite(
    "fuse_partial_rope",
    patterns=(_part_turned,),
    examples=tuple(
        {"x": (2, 1, 6), "cos": (2, 2), "sin": (2, 2), "start": 0, "rotary": 4, "end": 6, "interleaved": interleaved}
        for interleaved in (False, True)
    ),
    replacement=_whole,
    precondition=_part_precondition,
    numerics=Numerics.EXACT,
    stage=Stage.CAPTURED,
)
# llmc.rope computes in fp32 whatever x is.
fuse_rope_casts = Rewrite(
    "fuse_rope_casts",
    patterns=(_turned_in_fp32,),
    examples=({"x": (2, 1, 4), "cos": (2, 2), "sin": (2, 2)},),
    replacement=_whole,
    precondition=_cast_precondition,
    numerics=Numerics.EXACT,
    stage=Stage.CAPTURED,
)
