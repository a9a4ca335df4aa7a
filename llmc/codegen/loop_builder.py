"""Turn a group of nodes into a loop: loads of its inputs, the nodes' arithmetic, stores of values that others need."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmc.codegen.fuse_groups import Group
from llmc.codegen.kernel_ir import Apply, Constant, Load, Loop, Parameter, Reduce, Statement, Store, collapse
from llmc.codegen.loop_space import Space, dims_of, reads_in_place, result_view, strides_over
from llmc.codegen.views import View, Views, row_count, view_of
from llmc.graph.pointwise import Kind, emit, kind_of
from llmc.program.launch_arguments import Operand


@dataclass(frozen=True)
class Place:
    """The place of an element of memory in a loop: an operand without stride, its dtype and its row stride."""

    pointer: Operand
    dtype: str
    row_stride: int


# Says where a view's first element lies.
Locate = Callable[[View], Place]


def build_loop(
    group: Group, stored: Sequence[fx.Node], views: Views, copies: frozenset[fx.Node], locate: Locate
) -> tuple[Loop, tuple[Operand, ...]]:
    """The group's loop and the pointers of its parameters. stored: the nodes of the group that others read."""
    builder = _LoopBuilder(group.space, views, locate)
    for node in group.nodes:
        result = result_view(node, views, copies)
        builder.compute(node, result, is_copy=node in copies)
    for node in stored:
        builder.store(node, result_view(node, views, copies))
    return builder.finish()


def build_copy(view: View, to: Place, strides: tuple[int, ...], locate: Locate) -> tuple[Loop, tuple[Operand, ...]]:
    """A loop that writes a view's elements to `to`. strides: there, from one row, dim… of the view to the next."""
    builder = _LoopBuilder(view.shape, {}, locate)
    index = builder.load(view, kind_of(view.value.dtype))
    builder.store_at(index, to, _in_memory(strides, to))
    return builder.finish()


class _LoopBuilder:
    """The statements of one loop while it is being built."""

    def __init__(self, space: Space, views: Views, locate: Locate) -> None:
        self._space, self._views, self._locate = space, views, locate
        self._statements: list[Statement] = []
        self._numbers: dict[Statement, int] = {}
        self._parameters: dict[tuple[Operand, str, tuple[int, ...]], int] = {}
        self._written: set[int] = set()
        self._computed: dict[fx.Node, tuple[int, View]] = {}

    def compute(self, node: fx.Node, result: View, is_copy: bool) -> None:
        """Append the node's statements."""
        index = self.read(node.args[0], kind_of(result.value.dtype)) if is_copy else emit(node, self)
        self._computed[node] = index, result

    def store(self, node: fx.Node, result: View) -> None:
        """Write a computed node's value to its place."""
        place = self._locate(result.value.whole())
        strides = _in_memory(strides_over(result, self._space), place)
        self.store_at(self._computed[node][0], place, strides)

    def store_at(self, index: int, place: Place, strides: tuple[int, ...]) -> None:
        """Write an earlier value."""
        parameter = self._parameter(place, strides)
        self._written.add(parameter)
        kind = Kind.INT if place.dtype == "I32" else Kind.FLOAT
        self._append(Store(parameter, self._converted(index, kind)))

    def finish(self) -> tuple[Loop, tuple[Operand, ...]]:
        """The loop and its parameters' pointers."""
        parameters = tuple(
            Parameter(dtype, strides, i in self._written) for (_, dtype, strides), i in self._parameters.items()
        )
        loop = Loop(row_count(self._space), dims_of(self._space), parameters, tuple(self._statements))
        return collapse(loop), tuple(pointer for pointer, _, _ in self._parameters)

    # ---- what pointwise.py calls -------------------------------------------------------------------------------

    def read(self, argument: Any, kind: Kind) -> int:
        """An argument's element at the loop's place: what the loop has computed, or a load."""
        if not isinstance(argument, fx.Node):
            return self.number(argument, kind)
        view = view_of(argument, self._views)
        if view.value.node in self._computed:
            index, result = self._computed[view.value.node]
            assert reads_in_place(view, result.value, result, self._space), f"{argument.name} is read across the loop"
            return self._converted(index, kind)
        return self.load(view, kind)

    def load(self, view: View, kind: Kind) -> int:
        """The view's element at the loop's place."""
        place = self._locate(view)
        parameter = self._parameter(place, _in_memory(strides_over(view, self._space), place))
        loaded = Kind.INT if place.dtype == "I32" else Kind.FLOAT
        return self._converted(self._append(Load(parameter, loaded)), kind)

    def number(self, value: float | int | bool, kind: Kind) -> int:
        return self._append(Constant(value, kind))

    def apply(self, function: str, *operands: int, kind: Kind = Kind.FLOAT) -> int:
        """A function of earlier values."""
        return self._append(Apply(function, operands, kind))

    def reduce(self, reduction: str, operand: int) -> int:
        """A reduction over the columns."""
        return self._append(Reduce(reduction, operand))

    # ----------------------------------------------------------------------------------------------------------------

    def _converted(self, index: int, kind: Kind) -> int:
        statement = self._statements[index]
        assert not isinstance(statement, Store)
        if statement.kind is kind:
            return index
        if isinstance(statement, Constant):
            return self.number(statement.value, kind)
        return self.apply(f"to_{kind.value}", index, kind=kind)

    def _append(self, statement: Statement) -> int:
        """The statement's number; an equal one is not computed twice. Constants compare by value and kind."""
        if statement not in self._numbers:
            self._numbers[statement] = len(self._statements)
            self._statements.append(statement)
        return self._numbers[statement]

    def _parameter(self, place: Place, strides: tuple[int, ...]) -> int:
        key = (place.pointer, place.dtype, strides)
        return self._parameters.setdefault(key, len(self._parameters))


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the safetensors name of the dtype in which a computed tensor is stored; None if loops do not support
    it."""
    integers = dict.fromkeys((torch.int32, torch.int64), "I32")
    floats = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.bool: "F32"}
    return (floats | integers).get(dtype)


def _in_memory(strides: tuple[int, ...], place: Place) -> tuple[int, ...]:
    """Return the strides with the row stride that the value has in memory."""
    return (place.row_stride if strides[0] else 0, *strides[1:])


def contiguous_strides(space: Space, row_stride: int) -> tuple[int, ...]:
    """Strides over a space whose elements are contiguous within a row."""
    dims = dims_of(space)
    return (row_stride, *(math.prod(dims[axis + 1 :]) for axis in range(len(dims))))
