"""Comparisons and choices: setp, set, selp, slct."""

from collections.abc import Callable

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action
from llmc.ptx.instructions.halves import widened
from llmc.ptx.lanes import BOOL, NUMPY_TYPES, U16, UNSIGNED, Mask, Values, select
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.module import Pair, Sink
from llmc.ptx.rounding import flushed
from llmc.ptx.team import Team

_ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
# Comparisons of unsigned numbers, for any type.
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_TYPES = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "f16", "bf16")

Comparison = Callable[[Values, Values], Values]


def _has_nan(a: Values, b: Values) -> Values:
    return np.isnan(a) | np.isnan(b)


def _of_floats(name: str) -> Comparison | None:
    """Ordered comparisons are false of a NaN, `ne` included; unordered ones (`ltu`) are true of it."""
    if name == "num":
        return lambda a, b: ~_has_nan(a, b)
    if name == "nan":
        return _has_nan
    if name == "ne":
        return lambda a, b: (a != b) & ~_has_nan(a, b)
    if name in _ORDERED:
        return _ORDERED[name]
    plain = _ORDERED.get(name.removesuffix("u"))
    return None if plain is None else lambda a, b: plain(a, b) | _has_nan(a, b)


def build_setp(operands: Operands, modifiers: Modifiers) -> Action:
    """setp: compare two operands and write the predicate, optionally also its inverse, or combined with a third
    operand."""
    name, kind = modifiers.next(), modifiers.last()
    combine = modifiers.maybe(*_COMBINE)
    flushes = modifiers.flag("ftz") and kind == "f32"
    modifiers.finish()
    if kind not in _TYPES:
        raise modifiers.refused(f"the machine does not know it of .{kind}")
    operands.count(4 if combine else 3)
    dtype = NUMPY_TYPES[kind]
    is_half, is_float = kind in ("f16", "bf16"), kind in ("f16", "bf16", "f32", "f64")
    if name in _UNSIGNED and not is_float:
        compare: Comparison | None = _UNSIGNED[name]
        dtype = UNSIGNED[dtype.itemsize]
    else:
        compare = _of_floats(name) if is_float else _ORDERED.get(name)
    if compare is None:
        raise modifiers.refused(f"the machine does not know .{name} of .{kind}")
    relation = compare
    if is_half:
        dtype = U16
    first, second = operands.reader(1, dtype), operands.reader(2, dtype)
    third = operands.reader(3, BOOL) if combine else None
    target = operands.given[0]
    results = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    write, write_opposite = (operands.writer_of(result, BOOL) for result in results)
    has_opposite = isinstance(target, Pair)

    def run(team: Team, mask: Mask) -> None:
        a, b = first(team), second(team)
        if is_half:
            a, b = widened(a, kind), widened(b, kind)
        if flushes:
            a, b = flushed(a), flushed(b)
        holds, opposite = relation(a, b), None
        if has_opposite:
            opposite = ~holds
        if third is not None and combine is not None:
            other = third(team)
            holds = _COMBINE[combine](holds, other)
            opposite = None if opposite is None else _COMBINE[combine](opposite, other)
        write(team, holds, mask)
        if opposite is not None:
            write_opposite(team, opposite, mask)

    return run


def build_selp(operands: Operands, modifiers: Modifiers) -> Action:
    """selp: the first operand where the predicate is set, else the second, as raw bits."""
    kind = modifiers.one_of("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
    modifiers.finish()
    operands.count(4)
    dtype = UNSIGNED[NUMPY_TYPES[kind].itemsize]
    first, second, predicate = operands.reader(1, dtype), operands.reader(2, dtype), operands.reader(3, BOOL)
    write = operands.writer(0, dtype)

    def run(team: Team, mask: Mask) -> None:
        write(team, select(predicate(team), first(team), second(team)), mask)

    return run


def build_slct(operands: Operands, modifiers: Modifiers) -> Action:
    """slct: the first where a number is at least 0, else the second."""
    modifiers.flag("ftz")
    condition, kind = modifiers.last(), modifiers.last()
    if condition not in ("s32", "f32") or kind not in _TYPES:
        raise modifiers.refused("the machine does not know these types of it")
    modifiers.finish()
    operands.count(4)
    dtype = UNSIGNED[NUMPY_TYPES[kind].itemsize]
    tested = NUMPY_TYPES[condition]
    first, second, number = operands.reader(1, dtype), operands.reader(2, dtype), operands.reader(3, tested)
    write = operands.writer(0, dtype)

    def run(team: Team, mask: Mask) -> None:
        write(team, select(number(team) >= 0, first(team), second(team)), mask)

    return run
