"""Find which axes of a graph belong together, so that cutting one into ranks cuts them all.

Axes that an op's record gives one letter are one (llmc/graph/axes.py), and so are those that a pointwise op lines up
and those that a reshape joins or parts. Together they are a class: the rows of one product's weight, the channels of
its result, the heads of an attention, the columns of the next product's weight. Nothing is known of layers or names.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from llmc.graph.axes import Axis, AxisRule
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import OpRecord, op_call, record_of
from llmc.graph.pointwise import POINTWISE
from llmc.passes.parallel.equal_pieces import pieces
from llmc.passes.shapes import is_one

aten = torch.ops.aten
# A node and an axis of its value, from 0.
NodeAxis = tuple[fx.Node, int]
_RESHAPES = (aten.reshape.default, aten.view.default)


@dataclass(frozen=True)
class Scale:
    """How an axis follows its class: each `unit` elements of it go with `per` of the class. runs: the axis consists of
    this many consecutive runs, each following the class, as the rows of all experts in one matrix do."""

    per: int
    unit: int
    runs: int = 1

    def own(self, start: int, stop: int) -> tuple[int, int]:
        """The elements that go with start to stop of the class, all of each unit that is touched."""
        return start // self.per * self.unit, -(-stop // self.per) * self.unit


@dataclass(eq=False)
class AxesClass:
    """Axes that are split together. size: elements of the longest axis, or the least common multiple if it is not a
    multiple of another's. shared: numbers of elements with one shared unit that several ranks may hold, such as a KV
    head of many query heads, or the scale of a group. whole: numbers of elements that no split parts."""

    size: int
    members: dict[NodeAxis, Scale] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)

    def granule(self) -> int:
        """The least number of elements that may be parted from others."""
        return math.lcm(*(s.per for s in self.members.values() if s.per not in self.shared), *self.whole, 1)


class Placements:
    """The classes of a graph's axes. Axes of one element, and those whose size changes between steps, are in none."""

    def __init__(self, graph: ModelGraph) -> None:
        self._of: dict[NodeAxis, AxesClass] = {}
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if not isinstance(value, Tensor):
                continue
            for axis, size in enumerate(value.shape):
                if isinstance(size, int) and size > 1:
                    self._of[node, axis] = AxesClass(size, {(node, axis): Scale(1, 1)})
            if node.op == "call_function":
                self._relate(node)

    def classes(self) -> list[AxesClass]:
        """The classes of axes, in the order of the graph."""
        return list(dict.fromkeys(self._of.values()))

    def find(self, node: fx.Node, axis: int) -> AxesClass | None:
        """The class of an axis, counted from 0."""
        return self._of.get((node, axis))

    def scale(self, node: fx.Node, axis: int) -> Scale:
        """Return how an axis of a class is scaled relative to the class."""
        return self._of[node, axis].members[node, axis]

    def _relate(self, node: fx.Node) -> None:
        record = record_of(node)
        if record is not None and record.axes is not None:
            self._relate_by_rule(node, record.axes)
            self._keep_together(node, record)
        elif node.target in POINTWISE or (record is not None and record.across is not None):
            self._relate_elements(node)
        elif node.target in _RESHAPES:
            self._relate_reshape(node)
        elif node.target is aten.slice.Tensor:
            self._relate_kept(node)
            self._relate_slice(node)
        else:
            self._relate_kept(node)

    def _relate_kept(self, node: fx.Node) -> None:
        for axis, origin in _kept_axes(node):
            for operand in node.all_input_nodes:
                self._join((node, axis), (operand, origin))

    def _relate_slice(self, node: fx.Node) -> None:
        """Treat equal pieces of an axis as one axis, so that they are cut together."""
        parts = pieces(node)
        if parts is not None:
            inner, runs = (parts.count, 1) if parts.in_turns else (1, parts.count)
            self._join(parts.of, (node, parts.of[1]), inner, runs)

    def _relate_by_rule(self, node: fx.Node, rule: AxisRule) -> None:
        # By letters from the outer to the inner one; axes of one element are in no class, and left out.
        known: dict[tuple[str, ...], NodeAxis] = {}
        repeats: list[tuple[str, NodeAxis]] = []
        for axis, place in rule_axes(node):
            if axis.whole or place not in self._of:
                continue
            if axis.repeats:
                repeats.append((axis.letter, place))
                continue
            if axis.levels in known:
                self._join(known[axis.levels], place)
            else:
                known[axis.levels] = place
        for name in rule.leading:
            self._join_leading(node, call_arguments(node)[name], len(rule.arguments[name]), len(rule.result))
        for levels, place in known.items():
            outer = next((known[o] for n in range(len(levels) - 1, 0, -1) if (o := levels[:n]) in known), None)
            if outer is not None:
                self._join_runs(place, outer)
        for letter, place in repeats:
            if (earlier := known.get((letter,))) is not None:
                self._join(place, earlier, runs=_size(place) // _size(earlier))

    def _keep_together(self, node: fx.Node, record: OpRecord) -> None:
        place = (node, _rank(node) - 1)
        if record.least_part is not None and place in self._of:
            scale, own = self.scale(*place), self._of[place]
            least = record.least_part(op_call(node))
            own.whole.add(scale.per * least // math.gcd(scale.unit, least))

    def _join_leading(self, node: fx.Node, operand: Any, named: int, named_here: int) -> None:
        for axis in range(min(_rank(operand) - named, _rank(node) - named_here)):
            self._join((node, axis), (operand, axis))

    def _relate_elements(self, node: fx.Node) -> None:
        """Operands are lined up at their last axes; those of one element are repeated."""
        rank = node.meta["val"].dim()
        for operand in node.all_input_nodes:
            value = operand.meta["val"]
            for axis in range(value.dim() if isinstance(value, Tensor) else 0):
                self._join((node, axis + rank - value.dim()), (operand, axis))

    def _relate_reshape(self, node: fx.Node) -> None:
        """Axes that stay as they are, and the outer one of two that are joined or parted."""
        source = node.all_input_nodes[0]
        before, after = source.meta["val"].shape, node.meta["val"].shape
        for olds, news in same_runs(before, after):
            outer_old, outer_new = ((value, run[0]) for value, run in ((source, olds), (node, news)))
            if len(olds) == len(news) == 1:
                self._join(outer_old, outer_new)
            elif len(olds) == 1:
                self._join(outer_old, outer_new, inner=math.prod(after[i] for i in news[1:]))
            elif len(news) == 1:
                self._join(outer_new, outer_old, inner=math.prod(before[i] for i in olds[1:]))

    def _join(self, one: NodeAxis, other: NodeAxis, inner: int = 1, runs: int = 1) -> None:
        """Record that one axis is the other, or has `inner` elements for each of the other's, or is `runs` runs of it.
        Does nothing if an axis is in no class."""
        if one not in self._of or other not in self._of or not self._part_into_runs(one, other, runs):
            return
        first, second = self._of[one], self._of[other]
        mine, theirs = first.members[one], second.members[other]
        if inner % mine.unit and mine.unit % inner:
            return  # Neither axis's units lie within the other's elements.
        # The other axis in the first's class.
        common = math.gcd(inner, mine.unit)
        per, unit = mine.per * inner // common, mine.unit // common
        if first is second:
            return
        # Neither may be a multiple of the other: where heads are joined, those of 24 channels with those of 16.
        up, down = per * theirs.unit, unit * theirs.per
        common = math.gcd(up, down)
        self._rescale(first, down // common)
        self._absorb(first, second, up // common)

    def _part_into_runs(self, one: NodeAxis, other: NodeAxis, runs: int) -> bool:
        """Whether one of two axes can have `runs` times the runs of the other; if so, this is recorded."""
        one_runs, other_runs = self.scale(*one).runs, self.scale(*other).runs * runs
        if one_runs == other_runs:
            return True
        if self._of[one] is self._of[other]:
            return False
        return (
            _part(self._of[one], other_runs // one_runs)
            if other_runs % one_runs == 0
            else _part(self._of[other], one_runs // other_runs)
        )

    def _join_runs(self, runs: NodeAxis, outer: NodeAxis) -> None:
        """An axis is made of runs, one for each element of the other, which may be kept by several ranks."""
        length = _size(runs) // _size(outer)
        own = self._of[outer]
        if own is not self._of[runs]:
            # Within an element of the outer axis, what goes with which part of its run is not said.
            least = own.members[outer].per
            own.members = {place: _coarser(scale, least) for place, scale in own.members.items()}
        self._join(runs, outer, inner=length)
        if self._of[runs] is self._of[outer]:
            self._of[outer].shared.add(self.scale(*outer).per)

    def _rescale(self, axes: AxesClass, factor: int) -> None:
        axes.size *= factor
        axes.members = {place: replace(s, per=s.per * factor) for place, s in axes.members.items()}
        axes.shared = {per * factor for per in axes.shared}
        axes.whole = {per * factor for per in axes.whole}

    def _absorb(self, first: AxesClass, second: AxesClass, factor: int) -> None:
        self._rescale(second, factor)
        first.members |= second.members
        first.shared |= second.shared
        first.whole |= second.whole
        for place in second.members:
            self._of[place] = first


def _part(axes: AxesClass, count: int) -> bool:
    """Narrow a class to one of `count` equal runs, each split alike, if possible. Returns whether it was."""
    if count == 0 or axes.size % count or any(axes.size // count % per for per in _pers(axes)):
        return False
    axes.size //= count
    axes.members = {place: replace(scale, runs=scale.runs * count) for place, scale in axes.members.items()}
    return True


def _pers(axes: AxesClass) -> set[int]:
    return {*axes.shared, *axes.whole, *(scale.per for scale in axes.members.values())}


def _size(place: NodeAxis) -> int:
    size: int = place[0].meta["val"].shape[place[1]]
    return size


def _coarser(scale: Scale, per: int) -> Scale:
    return scale if scale.per % per == 0 else replace(scale, per=per, unit=scale.unit * per // scale.per)


def rule_axes(node: fx.Node) -> Iterator[tuple[Axis, NodeAxis]]:
    """The axes of the tensor arguments and of the result that the rule of a call's op names; none without a rule."""
    record = record_of(node)
    if record is None or record.axes is None:
        return
    arguments = call_arguments(node)
    for name, axes in record.axes.arguments.items():
        operand: Any = arguments[name]
        if isinstance(operand, fx.Node):
            yield from _from_the_last(operand, axes)
    yield from _from_the_last(node, record.axes.result)


def same_runs(before: Any, after: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Shortest runs of axes with equal numbers of elements on both sides of a reshape; an axis with a symbolic size is
    a separate run. Axes of one element are left out."""
    olds = [i for i, size in enumerate(before) if not is_one(size)]
    news = [i for i, size in enumerate(after) if not is_one(size)]
    while olds and news:
        left, right = [olds.pop(0)], [news.pop(0)]
        while not _same(before, left, after, right):
            if not all(isinstance(s, int) for s in (*(before[i] for i in left), *(after[i] for i in right))):
                return
            is_short = math.prod(before[i] for i in left) < math.prod(after[i] for i in right)
            run, rest = (left, olds) if is_short else (right, news)
            if not rest:
                return
            run.append(rest.pop(0))
        yield left, right


def _kept_axes(node: fx.Node) -> list[tuple[int, int]]:
    """Axes of the result and those of the operands that they are, of ops that only move data, and of reductions."""
    arguments, rank = call_arguments(node), _rank(node)
    if node.target is aten.permute.default:
        return [(axis, dim % rank) for axis, dim in enumerate(arguments["dims"])]
    if node.target is aten.transpose.int:
        swapped = {arguments["dim0"] % rank: arguments["dim1"] % rank}
        swapped |= {new: old for old, new in swapped.items()}
        return [(axis, swapped.get(axis, axis)) for axis in range(rank)]
    if node.target is aten.unsqueeze.default:
        dim = arguments["dim"] % rank
        return [(axis, axis - (axis > dim)) for axis in range(rank) if axis != dim]
    if node.target in (aten.select.int, aten.squeeze.dim):
        dim = arguments["dim"] % _rank(node.all_input_nodes[0])
        return [(axis, axis + (axis >= dim)) for axis in range(rank)]
    if node.target in (aten.slice.Tensor, aten.cat.default, aten._softmax.default):
        return [(axis, axis) for axis in range(rank) if axis != arguments["dim"] % rank]
    if node.target in (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default):
        dims = arguments["dim"]
        reduced = {dim % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])}
        return [(axis, axis) for axis in range(rank) if axis not in reduced] if arguments["keepdim"] else []
    if node.target is aten.expand.default:
        before = _rank(node.all_input_nodes[0])
        return [(axis + rank - before, axis) for axis in range(before)]
    return []


def _rank(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.dim() if isinstance(value, Tensor) else 0


def _same(before: Any, left: list[int], after: Any, right: list[int]) -> bool:
    if len(left) == len(right) == 1:
        one, other = before[left[0]], after[right[0]]
        return str(one) == str(other)
    sizes = [*(before[i] for i in left), *(after[i] for i in right)]
    if not all(isinstance(size, int) for size in sizes):
        return False
    return bool(math.prod(sizes[: len(left)]) == math.prod(sizes[len(left) :]))


def _from_the_last(node: fx.Node, axes: tuple[Axis, ...]) -> Iterator[tuple[Axis, NodeAxis]]:
    rank = node.meta["val"].dim()
    for back, axis in enumerate(axes[:rank], 1):
        yield axis, (node, rank - back)
