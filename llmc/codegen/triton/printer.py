"""Print a loop as a Triton kernel: a tile of rows by columns at once, reductions along the columns, masks at the edges.

A program owns TILE places of the outer axes (row and all dims but the last, counted as one), and BLOCK columns. Where
a reduction needs more columns than a block, the program sweeps over them, once for each phase of the loop.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmc.codegen.kernel_ir import Apply, Constant, Load, Loop, Reduce, Store
from llmc.graph.pointwise import Kind
from llmc.program import RowCount

_MOST_ELEMENTS = 1024
_MOST_COLUMNS = 8192
_ELEMENTS_PER_WARP = 512
_KINDS = {Kind.FLOAT: "tl.float32", Kind.INT: "tl.int32", Kind.BOOL: "tl.int1"}
# Written between the operands, where a Python number may stand for one of them.
_INFIX = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "and": "{} & {}",
    "or": "{} | {}",
    "where": "tl.where({}, {}, {})",
}
_FUNCTIONS = {
    "not": "~{}",
    "neg": "-{}",
    "square": "{0} * {0}",
    "reciprocal": "1.0 / {}",
    "pow": "power({}, {})",
    "relu": "tl.maximum({}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "to_float": "{}.to(tl.float32)",
    "to_int": "{}.to(tl.int32)",
    "to_bool": "{} != 0",
    "round_bf16": "{}.to(tl.bfloat16).to(tl.float32)",
    "round_f16": "{}.to(tl.float16).to(tl.float32)",
    "tanh": "tanh({})",
    "softplus": "softplus({})",
    **{
        name: f"tl.{name}({{}})"
        for name in ("abs", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "erf", "floor", "ceil")
    },
    **{name: f'activate({{}}, "{name}")' for name in ("sigmoid", "silu", "gelu", "gelu_tanh")},
}
_BY_KIND = {
    ("maximum", Kind.FLOAT): "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    ("minimum", Kind.FLOAT): "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    ("maximum", Kind.INT): "tl.maximum({}, {})",
    ("minimum", Kind.INT): "tl.minimum({}, {})",
    ("floor_div", Kind.FLOAT): "floor_div_float({}, {})",
    ("floor_div", Kind.INT): "floor_div_int({}, {})",
    ("remainder", Kind.FLOAT): "remainder_float({}, {})",
    ("remainder", Kind.INT): "remainder_int({}, {})",
}
# Rounded by itself, so that the threads that add up squares agree on their sum (kernels/agreed_sums.py).
_SQUARE = "tl.fma({0}, {0}, 0.0)"
# The value of a masked column, the operation on two columns, and the operation on a block.
_REDUCTIONS = {
    "sum": ("0.0", "{} + {}", "agreed_sum({}, 1, True)"),
    "mean": ("0.0", "{} + {}", "agreed_sum({}, 1, True)"),
    "max": ('float("-inf")', "tl.maximum({}, {})", "tl.max({}, 1, keep_dims=True)"),
    "min": ('float("inf")', "tl.minimum({}, {})", "tl.min({}, 1, keep_dims=True)"),
}

MODULE_HEAD = '''"""The loops of {model}: pointwise, broadcast and reduction work, each group one kernel. Generated."""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.activation import activate
from llmc.codegen.triton.kernels.agreed_sums import agreed_sum
from llmc.codegen.triton.kernels.loop_math import (
    floor_div_float,
    floor_div_int,
    power,
    remainder_float,
    remainder_int,
    softplus,
    tanh,
)
'''


@dataclass(frozen=True)
class LoopTile:
    """The part of a loop that one program computes.

    outer: places of the outer axes per program. block: columns at a time.

    sweeps: whether a program takes all columns, block by block, instead of one block only.
    """

    outer: int
    block: int
    sweeps: bool
    num_warps: int


def loop_tile(loop: Loop) -> LoopTile:
    """Return the tile of a loop that each program computes."""
    reduces = any(isinstance(s, Reduce) for s in loop.statements)
    # A store of one element a row must not run in one program while another one still loads that element.
    in_one_program = reduces or any(
        isinstance(s, Store) and not per_column for s, per_column in zip(loop.statements, loop.per_column, strict=True)
    )
    whole = 1 << (loop.dims[-1] - 1).bit_length()
    block = min(whole, _MOST_COLUMNS if reduces else _MOST_ELEMENTS)
    outer = max(1, min(16, _MOST_ELEMENTS // block))
    num_warps = max(1, min(16, outer * block // _ELEMENTS_PER_WARP))
    return LoopTile(outer, block, in_one_program and block < whole, num_warps)


def loop_grid(loop: Loop) -> tuple[str, ...]:
    """Programs along the outer axes, and along the columns if there are several blocks of them."""
    tile, places = loop_tile(loop), math.prod(loop.dims[:-1])
    rows = "1" if loop.rows is RowCount.ONE else loop.rows.value
    outer = rows if places == 1 else f"{rows} * {places}"
    outer = outer if tile.outer == 1 else f"cdiv({outer}, {tile.outer})"
    blocks = -(-loop.dims[-1] // tile.block)
    return (outer,) if tile.sweeps or blocks == 1 else (outer, str(blocks))


def needs_rows(loop: Loop) -> bool:
    """Whether the kernel takes the number of rows: tiles of several places may reach past the last one."""
    return loop_tile(loop).outer > 1


def print_module(model: str, loops: Sequence[str]) -> str:
    return MODULE_HEAD.replace("{model}", model.replace("\\", "/").replace('"', "'")) + "".join(
        f"\n\n{x}" for x in loops
    )


def print_loop(name: str, loop: Loop, comment: str) -> str:
    """The kernel `name(p0, p1, …)`, with `rows` last if `needs_rows`. Pointers are to parameters' first elements."""
    parameters = [f"p{i}" for i in range(len(loop.parameters))] + ["rows"] * needs_rows(loop)
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += ["@triton.jit", f"def {name}({', '.join(parameters)}):"]
    return "\n".join([*lines, *("    " + line for line in _Printer(loop).body())]) + "\n"


class _Printer:
    """Prints one loop's body."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._tile = loop, loop_tile(loop)

    def body(self) -> Iterator[str]:
        loop, tile = self._loop, self._tile
        places = math.prod(loop.dims[:-1])
        yield f"outer = tl.program_id(0) * {tile.outer} + tl.arange(0, {tile.outer})[:, None]"
        if tile.outer > 1:
            yield f"inside = outer < rows{f' * {places}' if places > 1 else ''}"
        yield f"row = {f'(outer // {places})' if places > 1 else 'outer'}.to(tl.int64)"
        for axis, size in enumerate(loop.dims[:-1]):
            step = math.prod(loop.dims[axis + 1 : -1])
            index = f"outer // {step}" if step > 1 else "outer"
            yield f"i{axis} = {index}" + (f" % {size}" if axis > 0 or loop.rows is not RowCount.ONE else "")
        if tile.sweeps:
            yield from self._sweeps()
            return
        start = "" if len(loop_grid(loop)) == 1 else f"tl.program_id(1) * {tile.block} + "
        yield self._columns(start)
        for i, s in enumerate(loop.statements):
            if isinstance(s, Reduce):
                neutral, _, whole = _REDUCTIONS[s.reduction]
                yield f"v{i} = {self._mean(s, whole.format(self._where_present(s.operand, neutral)))}"
            elif isinstance(s, Load | Apply):
                yield self._assignment(i)
        for s in loop.statements:
            if isinstance(s, Store):
                yield self._store(s)

    def _sweeps(self) -> Iterator[str]:
        """Yield the code of the passes over all columns, block by block, one per phase; a phase loads its values
        again."""
        loop = self._loop
        last = max(loop.phases, default=0)
        for phase in range(last + 1):
            for i, s in enumerate(loop.statements):
                if isinstance(s, Load | Apply) and loop.phases[i] == phase and not loop.per_column[i]:
                    yield self._assignment(i)
            yield from self._sweep(phase, is_last=phase == last)
        for i, s in enumerate(loop.statements):
            if isinstance(s, Store) and not loop.per_column[i]:
                yield self._store(s)

    def _sweep(self, phase: int, is_last: bool) -> Iterator[str]:
        loop, tile = self._loop, self._tile
        reduced = {i: s for i, s in enumerate(loop.statements) if isinstance(s, Reduce) and loop.phases[i] == phase + 1}
        stores = {
            i: s for i, s in enumerate(loop.statements) if isinstance(s, Store) and loop.per_column[i] and is_last
        }
        if not reduced and not stores:
            return
        for i, r in reduced.items():
            yield f"b{i} = tl.full([{tile.outer}, {tile.block}], {_REDUCTIONS[r.reduction][0]}, tl.float32)"
        yield f"for start in range(0, {loop.dims[-1]}, {tile.block}):"
        yield "    " + self._columns("start + ")
        for i in loop.needed([*reduced, *stores]):
            if i in reduced:
                neutral, joined, _ = _REDUCTIONS[reduced[i].reduction]
                yield f"    b{i} = {joined.format(f'b{i}', self._where_present(reduced[i].operand, neutral))}"
            elif i in stores:
                yield "    " + self._store(stores[i])
            elif loop.per_column[i]:
                yield "    " + self._assignment(i)
        for i, r in reduced.items():
            yield f"v{i} = {self._mean(r, _REDUCTIONS[r.reduction][2].format(f'b{i}'))}"

    def _columns(self, start: str) -> str:
        return f"c = {start}tl.arange(0, {self._tile.block})[None, :]"

    def _mean(self, s: Reduce, total: str) -> str:
        return f"{total} / {float(self._loop.dims[-1])}" if s.reduction == "mean" else total

    def _where_present(self, operand: int, neutral: str) -> str:
        """A value as a whole tile, with `neutral` in columns past the last one."""
        present = f"c < {self._loop.dims[-1]}" if self._cuts_columns else "c >= 0"
        if not self._cuts_columns and self._loop.per_column[operand]:
            return self._operand(operand)
        return f"tl.where({present}, {self._operand(operand)}, {neutral})"

    @property
    def _cuts_columns(self) -> bool:
        return self._loop.dims[-1] % self._tile.block != 0

    def _assignment(self, index: int) -> str:
        s = self._loop.statements[index]
        if isinstance(s, Load):
            loaded = f"tl.load({self._element(s.parameter)})"
            is_half = self._loop.parameters[s.parameter].dtype in ("BF16", "F16")
            return f"v{index} = {loaded}" + (".to(tl.float32)" if is_half else "")
        assert isinstance(s, Apply)
        are_numbers = all(isinstance(self._loop.statements[o], Constant) for o in s.operands)
        operands = [self._operand(o, as_tensor=are_numbers or s.function not in _INFIX) for o in s.operands]
        return f"v{index} = {_pattern(s).format(*operands)}"

    def _store(self, s: Store) -> str:
        pointer, _, mask = self._element(s.parameter).partition(", ")
        value = self._operand(s.operand, as_tensor=True)
        rounded = {"BF16": ".to(tl.bfloat16)", "F16": ".to(tl.float16)"}.get(
            self._loop.parameters[s.parameter].dtype, ""
        )
        return f"tl.store({pointer}, {value}{rounded}" + (f", {mask})" if mask else ")")

    def _operand(self, index: int, as_tensor: bool = False) -> str:
        s = self._loop.statements[index]
        if not isinstance(s, Constant):
            return f"v{index}"
        return f"tl.full([1, 1], {_literal(s)}, {_KINDS[s.kind]})" if as_tensor else _literal(s)

    def _element(self, parameter: int) -> str:
        """Pointer and mask of a parameter at the loop's place."""
        names = ["row", *(f"i{axis}" for axis in range(len(self._loop.dims) - 1)), "c"]
        strides = self._loop.parameters[parameter].strides
        terms = [n if stride == 1 else f"{n} * {stride}" for n, stride in zip(names, strides, strict=True) if stride]
        masks = ["inside"] if self._tile.outer > 1 and any(strides[:-1]) else []
        if strides[-1] and self._cuts_columns:
            masks.append(f"(c < {self._loop.dims[-1]})" if masks else f"c < {self._loop.dims[-1]}")
        pointer = " + ".join([f"p{parameter}", *(terms or ["row * 0"])])
        return pointer + (f", {' & '.join(masks)}" if masks else "")


def _pattern(s: Apply) -> str:
    """Return the text of a function, with places for its operands."""
    if s.kind is Kind.FLOAT and (s.function == "square" or (s.function == "mul" and len(set(s.operands)) == 1)):
        return _SQUARE
    return _INFIX.get(s.function) or _FUNCTIONS.get(s.function) or _BY_KIND[s.function, s.kind]


def _literal(constant: Constant) -> str:
    if constant.kind is Kind.BOOL:
        return "True" if constant.value else "False"
    if constant.kind is Kind.INT:
        return str(int(constant.value)) if constant.value >= 0 else f"({int(constant.value)})"
    value = float(constant.value)
    if not math.isfinite(value):
        return f'float("{value}")'
    return repr(value) if value >= 0 else f"({value!r})"
