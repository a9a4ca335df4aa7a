"""Decide which values share memory: results that overwrite an input, and logits in the caller's buffer.

A launch may write where it reads if the old contents are not read afterwards, and if it reads each element only at the
place where it writes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from llmc.codegen.call import arguments_of
from llmc.codegen.fuse_groups import Group
from llmc.codegen.loop_space import result_view, strides_over
from llmc.codegen.views import Value, View, Views, operand_views

Unit = fx.Node | Group
# Arguments of a node's kernel that may lie where a result goes, and which result.
InPlace = Callable[[fx.Node], tuple[tuple[str, int], ...]]


@dataclass(frozen=True)
class Placement:
    """The place of a value: `offset` elements into each row of the home value's buffer, or (None) in the logits."""

    home: Value | None
    offset: int
    row_stride: int


@dataclass(frozen=True)
class _Read:
    unit: int
    view: View


def unit_nodes(unit: Unit) -> tuple[fx.Node, ...]:
    """The nodes that a launch computes."""
    return unit.nodes if isinstance(unit, Group) else (unit,)


def unit_reads(unit: Unit, views: Views) -> tuple[View, ...]:
    """The values that a unit reads from memory, without duplicates."""
    inside = set(unit_nodes(unit))
    reads = dict.fromkeys(v for node in unit_nodes(unit) for v in operand_views(node, views))
    return tuple(v for v in reads if v.value.node not in inside)


def row_stride_only(view: View) -> bool:
    """Whether the view's rows are contiguous, so that a pointer and a row stride describe it."""
    step = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if isinstance(size, int):
            if size != 1 and stride != step:
                return False
            step *= size
    return True


class Placer:
    """Finds a placement for each value that the units write.

    written: the values that each unit must leave in memory. kept: values other than the output that are read after the
    last unit.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        written: Sequence[tuple[Value, ...]],
        output: View,
        kept: Sequence[View],
        views: Views,
        copies: frozenset[fx.Node],
        in_place: InPlace,
    ) -> None:
        self._units, self._written, self._output = units, written, output
        self._views, self._copies, self._in_place_arguments = views, copies, in_place
        self._reads: dict[Value, list[_Read]] = {}
        self._unit_reads = [unit_reads(unit, views) for unit in units]
        for i, reads in enumerate(self._unit_reads):
            for view in reads:
                self._reads.setdefault(view.value, []).append(_Read(i, view))
        for view in (output, *kept):
            self._reads.setdefault(view.value, []).append(_Read(len(units), view))
        self._placements: dict[Value, Placement] = {}
        self._residents: dict[Value, list[Value]] = {}

    def place(self) -> dict[Value, Placement]:
        """The placement of every value that is written to memory."""
        self._place_logits()
        for i, values in enumerate(self._written):
            for value in values:
                if value not in self._placements:
                    self._put(value, self._in_place(i, value) or Placement(value, 0, value.columns))
        return self._placements

    def _put(self, value: Value, placement: Placement) -> None:
        self._placements[value] = placement
        if placement.home is not None:
            self._residents.setdefault(placement.home, []).append(value)

    def _place_logits(self) -> None:
        """The output, and what a loop turns into it in place."""
        value = self._output.value
        if self._output != value.whole() or value.dtype != torch.float32 or value.node.op == "placeholder":
            return
        writers = {v: i for i, values in enumerate(self._written) for v in values}
        while True:
            self._placements[value] = Placement(None, 0, value.columns)
            source = next(
                (
                    view.value
                    for view in self._replaceable(writers[value], value)
                    if view == view.value.whole() and all(r.unit == writers[value] for r in self._reads[view.value])
                ),
                None,
            )
            if source is None or source in self._placements:
                return
            value = source

    def _in_place(self, unit: int, value: Value) -> Placement | None:
        for view in self._replaceable(unit, value):
            old = self._placements[view.value]
            if old.home is not None and self._is_free(unit, view, old):
                return Placement(old.home, old.offset + view.offset, old.row_stride)
        return None

    def _replaceable(self, unit: int, value: Value) -> Iterator[View]:
        """Inputs of the unit that its result may overwrite: both are traversed alike, and other reads do not
        interfere."""
        for view in self._walked_alike(unit, value):
            computed = view.value.node.op != "placeholder"
            others = (v for v in self._unit_reads[unit] if v != view)
            if computed and view.value.dtype == value.dtype and not any(v.overlaps(view) for v in others):
                yield view

    def _walked_alike(self, unit: int, value: Value) -> Iterator[View]:
        launch = self._units[unit]
        if isinstance(launch, Group):
            result = result_view(value.node, self._views, self._copies)
            for view in self._unit_reads[unit]:
                a, b = strides_over(view, launch.space), strides_over(result, launch.space)
                same_size = view.rows is value.rows and view.columns == value.columns
                if same_size and a[1:] == b[1:] and (a[0] != 0) == (b[0] != 0):
                    yield view
            return
        for name, index in self._in_place_arguments(launch):
            source = self._views[arguments_of(launch)[name]]
            if index == value.index and isinstance(source, View) and row_stride_only(source):
                yield source

    def _is_free(self, unit: int, view: View, old: Placement) -> bool:
        """Whether nothing reads that part of the buffer after this unit, and this unit writes nothing else there."""
        assert old.home is not None
        start, end = (old.offset + edge for edge in view.extent())
        for value in self._residents[old.home]:
            at = self._placements[value].offset
            if value in self._written[unit] and start < at + value.columns and at < end:
                return False
            for read in self._reads.get(value, ()):
                low, high = (at + edge for edge in read.view.extent())
                interferes = read.unit > unit or (read.unit == unit and read.view != view)
                if interferes and start < high and low < end:
                    return False
        return True
