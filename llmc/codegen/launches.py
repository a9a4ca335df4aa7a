"""The sequence of launches: loops, kernel calls and copies, with the buffers that they keep alive."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from llmc.codegen.backend import Backend, KernelCall
from llmc.codegen.call import arguments_of
from llmc.codegen.claims import Claims
from llmc.codegen.fuse_groups import Group
from llmc.codegen.kernel_ir import Apply, Loop, Reduce
from llmc.codegen.loop_builder import Place, build_copy, build_loop, contiguous_strides, dtype_name
from llmc.codegen.loop_space import dims_of, strides_over
from llmc.codegen.memory_plan import Lifetime, MemoryPlan, plan_memory
from llmc.codegen.node_call import NodeCall
from llmc.codegen.origin import origin_of, unsupported
from llmc.codegen.placement import Placement, Placer, Unit, row_stride_only, unit_nodes, unit_reads
from llmc.codegen.side_views import SideViews
from llmc.codegen.views import KEEP_TOKENS_APART, Value, View, Views, view_of, views_of
from llmc.codegen.weight_slots import WeightSlots
from llmc.graph.cost import group_cost
from llmc.graph.model_graph import ModelGraph
from llmc.program import (
    ITEMSIZES,
    STEP_INPUTS,
    Affine,
    Alternative,
    Buffer,
    Launch,
    Layout,
    Limits,
    Origin,
    RowCount,
    SideOutput,
)
from llmc.program.launch_arguments import Operand

CONCATENATIONS = frozenset({torch.ops.aten.cat.default, torch.ops.aten.stack.default})

# Copies that a launch needs, and its own memory, are numbered from here on as results of its node, past any real ones.
_FIRST_OWN = 100
# Buffers of a node's own workspace, which no loop computes.
_CODES = {torch.int8: "I8", torch.uint8: "U8"}


class LaunchBuilder:
    """The step while it grows, launch by launch. loops: the name of each different loop."""

    def __init__(
        self,
        graph: ModelGraph,
        backend: Backend,
        claims: Claims,
        views: Views,
        copies: frozenset[fx.Node],
        units: Sequence[Unit],
        output: View,
        sides: SideViews,
        stand_ins: Mapping[fx.Node, fx.Node],
        limits: Limits,
    ) -> None:
        self.limits = limits
        self.graph, self.claims, self.views = graph, claims, views
        self._copies, self._output, self._sides, self._stand_ins = copies, output, sides, stand_ins
        self._backend = backend
        kept = tuple(sides.views.values())
        self._written = _written(units, (output, *kept), views)
        written = [self._written[u] for u in units]
        self._placements = Placer(units, written, output, kept, views, copies, backend.in_place).place()
        self.launches: list[Launch] = []
        self._names: dict[Value, str] = {}
        self._own = itertools.count(_FIRST_OWN)
        self.weights = WeightSlots(graph, views, backend)
        self.alternatives: list[Alternative] = []
        self.loops: dict[Loop, str] = {}
        self.side_outputs: list[SideOutput] = []

    def emit(self, unit: Unit) -> None:
        start, alternatives = len(self.launches), len(self.alternatives)
        self._emit(unit)
        sides = self._sides.of_nodes(unit_nodes(unit)) if self._sides.views else ()
        stand_in = None if isinstance(unit, Group) else self._stand_ins.get(unit)
        unless = () if stand_in is None else self._sides.of_nodes((stand_in,))
        if sides or unless:
            self.launches[start:] = [replace(x, sides=sides, unless=unless) for x in self.launches[start:]]
            self.alternatives[alternatives:] = [
                replace(a, launches=tuple(replace(x, sides=sides, unless=unless) for x in a.launches))
                for a in self.alternatives[alternatives:]
            ]
        if stand_in is not None and isinstance(unit, fx.Node):
            self._copy_first_rows(stand_in, unit, unless)

    def _emit(self, unit: Unit) -> None:
        if isinstance(unit, Group):
            stored = [value.node for value in self._written[unit]]
            loop, pointers = build_loop(unit, stored, self.views, self._copies, self.locate)
            self._launch_loop(loop, pointers, unit.nodes)
        elif unit.target in CONCATENATIONS:
            self._concatenate(unit)
        else:
            nodes = self.claims.unit(unit)
            cost, origin = group_cost(nodes), origin_of(nodes)
            moved, flops = str(cost.bytes_moved), str(cost.flops)
            call = NodeCall(self, unit)
            groups = self._backend.calls(unit, call)
            self.launches += call.copies
            for group in groups:
                start = len(self.launches)
                self.launches += _group_launches(group, origin, moved, flops)
                for other in group[0].others:
                    launches = tuple(_group_launches(other, origin, moved, flops))
                    self.alternatives.append(Alternative(start, len(self.launches) - 1, launches, ()))

    def _copy_first_rows(self, stand_in: fx.Node, product: fx.Node, sides: tuple[str, ...]) -> None:
        """Copy a product's result from the product that replaces it."""
        wide, narrow = view_of(stand_in, self.views), view_of(product, self.views)
        first = View(wide.value, wide.offset, narrow.shape, (wide.strides[0], *wide.strides[2:]))
        loop, pointers = build_copy(first, self.locate(narrow), strides_over(narrow, narrow.shape), self.locate)
        self._launch_loop(loop, pointers, (product,))
        self.launches[-1] = replace(self.launches[-1], sides=sides)

    def finish_logits(self) -> None:
        """Copy the output into the caller's logits, where the launch that makes it could not write it there."""
        if self._placements.get(self._output.value) != Placement(None, 0, self._output.value.columns):
            place = Place(Operand("output", "logits"), "F32", self._output.columns)
            strides = contiguous_strides(self._output.shape, self._output.columns)
            loop, pointers = build_copy(self._output, place, strides, self.locate)
            self._launch_loop(loop, pointers, (self._output.value.node,))

    def finish_sides(self) -> None:
        """Put each side output into a buffer of its exact size."""
        for name, view in self._sides.views.items():
            copies: list[Launch] = []
            whole = self.contiguous(view, view.value.dtype, view.value.node, copies, packed=True)
            self.launches += [replace(launch, sides=(name,)) for launch in copies]
            operand, _ = self.operand(whole)
            self.side_outputs.append(
                SideOutput(name, _dtype_of(whole.value), whole.rows, dims_of(whole.shape), operand.name)
            )

    def planned_buffers(self) -> tuple[tuple[Buffer, ...], MemoryPlan]:
        """The buffers that the launches use, with their places in the arena; side outputs stay to the end."""
        homes = {name: home for home, name in self._names.items()}
        kept = dict.fromkeys((side.buffer for side in self.side_outputs), len(self.launches) - 1)
        spans = spans_of(self.launches).items()
        return plan_buffers([_unplaced(n, homes[n], first, kept.get(n, last)) for n, (first, last) in spans])

    def planned_alternatives(self) -> tuple[Alternative, ...]:
        """The alternatives, with the buffers that no launch uses; where sites are alike, as in layers, the first's."""
        homes = {name: home for home, name in self._names.items()}
        used = spans_of(self.launches)
        alternatives: dict[Hashable, Alternative] = {}
        for alternative in self.alternatives:
            key = alike(self.launches[alternative.first : alternative.last + 1]), alike(alternative.launches)
            if key in alternatives:
                continue
            names = dict.fromkeys(n for launch in alternative.launches for n in _buffers_of(launch) if n not in used)
            span = alternative.first, alternative.last
            alternatives[key] = replace(alternative, buffers=tuple(_unplaced(n, homes[n], *span) for n in names))
        return tuple(alternatives.values())

    # ---- memory ----------------------------------------------------------------------------------------------------

    def locate(self, view: View) -> Place:
        """The offset of a view's first element, for a loop."""
        value = view.value
        if value.node.name in self.graph.weights:
            return self._locate_weight(view)
        if value.node.op == "placeholder":
            return Place(Operand("input", value.node.name, view.offset), STEP_INPUTS[value.node.name], value.columns)
        operand, stride = self.operand(view)
        return Place(operand, _dtype_of(value), stride)

    def _locate_weight(self, view: View) -> Place:
        value = view.value
        as_vector = len(value.shape) < 2 or not value.dtype.is_floating_point
        layout = Layout.VECTOR_F32 if as_vector else Layout.ROWS
        slot = self.weights.request(value.node, layout, value.dtype)
        return Place(Operand("weight", slot.name, view.offset), slot.dtype, value.columns)

    def operand(self, view: View) -> tuple[Operand, int]:
        """The pointer to a computed view, and its row stride."""
        placement = self._placements[view.value]
        if placement.home is None:
            return Operand("output", "logits", view.offset), placement.row_stride
        name = self._names.setdefault(placement.home, _buffer_name(placement.home))
        return Operand("buffer", name, placement.offset + view.offset), placement.row_stride

    def contiguous(
        self, view: View, dtype: torch.dtype, node: fx.Node, copies: list[Launch], packed: bool = False
    ) -> View:
        """The view itself, or that of a copy in which rows are contiguous and elements of the dtype.

        copies: receives the launch that copies, which runs before the node's. packed: the rows must also be contiguous.
        """
        columns = view.columns
        fits = row_stride_only(view) and _dtype_of(view.value) == dtype_name(dtype)
        placement = self._placements.get(view.value)
        if fits and placement is not None and (not packed or placement.row_stride == columns):
            return view
        copy = Value(node, next(self._own), dtype, view.shape)
        self._placements[copy] = Placement(copy, 0, columns)
        self._names[copy] = f"{node.name}_operand{len(self.launches) + len(copies)}"
        place = self.locate(copy.whole())
        loop, pointers = build_copy(view, place, strides_over(copy.whole(), view.shape), self.locate)
        copies.append(self._loop_launch(loop, pointers, (node,), nbytes=2 * columns * dtype.itemsize))
        return copy.whole()

    def workspace(self, node: fx.Node, name: str, rows: RowCount, columns: int, dtype: torch.dtype) -> Operand:
        """A buffer of its own for the launches of one node."""
        value = Value(node, next(self._own), dtype, (rows, columns))
        self._names[value] = f"{node.name}_{name}"
        return Operand("buffer", self._names[value], stride=columns)

    # ---- launches --------------------------------------------------------------------------------------------------

    def _launch_loop(
        self, loop: Loop, pointers: Sequence[Operand], nodes: Sequence[fx.Node], nbytes: int | None = None
    ) -> None:
        self.launches.append(self._loop_launch(loop, pointers, nodes, nbytes))

    def _loop_launch(
        self, loop: Loop, pointers: Sequence[Operand], nodes: Sequence[fx.Node], nbytes: int | None = None
    ) -> Launch:
        name = self.loops.setdefault(loop, f"loop_{len(self.loops)}_{_loop_title(loop)}")
        call, cost = self._backend.loop_call(name, loop, pointers), group_cost(nodes)
        moved = str(cost.bytes_moved) if nbytes is None else f"{nbytes}*{loop.rows.value}"
        return _launch(call, origin_of(nodes), moved, str(cost.flops))

    def _concatenate(self, node: fx.Node) -> None:
        """Append a copying loop for each part, into its place in the result."""
        arguments, result = arguments_of(node), view_of(node, self.views)
        axis = arguments["dim"] % len(result.shape)
        if isinstance(result.shape[axis], RowCount):
            raise unsupported(node, "it joins tensors along the token axis", KEEP_TOKENS_APART)
        start = 0
        for part in arguments["tensors"]:
            view = view_of(part, self.views)
            if node.target is torch.ops.aten.stack.default:
                shape, strides = view.shape, view.strides
                shape, strides = (*shape[:axis], 1, *shape[axis:]), (*strides[:axis], 0, *strides[axis:])
                view = View(view.value, view.offset, shape, strides)
            size = view.shape[axis]
            if not isinstance(size, int):
                raise unsupported(node, "it joins tensors along the token axis", KEEP_TOKENS_APART)
            to = self.locate(View(result.value, start * result.strides[axis], view.shape, result.strides))
            over = View(result.value, 0, view.shape, result.strides)
            loop, pointers = build_copy(view, to, strides_over(over, view.shape), self.locate)
            nbytes = 2 * view.columns * ITEMSIZES[_dtype_of(result.value)]
            self._launch_loop(loop, pointers, (node,), nbytes)
            start += size


def spans_of(launches: Sequence[Launch]) -> dict[str, tuple[int, int]]:
    """The first and the last launch that uses each buffer."""
    spans: dict[str, tuple[int, int]] = {}
    for i, launch in enumerate(launches):
        for name in _buffers_of(launch):
            spans[name] = spans.get(name, (i, i))[0], i
    return spans


def alike(launches: Sequence[Launch]) -> Hashable:
    """Return a key that is equal for launches of the same kernels that differ in their operands only."""
    return tuple(
        (x.kernel, x.grid, x.only, *((n, a) for n, a in x.arguments.items() if not isinstance(a, Operand)))
        for x in launches
    )


def plan_buffers(unplaced: Sequence[Buffer]) -> tuple[tuple[Buffer, ...], MemoryPlan]:
    """The buffers with their places in an arena."""
    lifetimes = [Lifetime(b.rows, b.columns * ITEMSIZES[b.dtype], b.first_launch, b.last_launch) for b in unplaced]
    plan = plan_memory(lifetimes)
    return tuple(replace(b, offset=offset) for b, offset in zip(unplaced, plan.offsets, strict=True)), plan


def _unplaced(name: str, value: Value, first: int, last: int) -> Buffer:
    return Buffer(name, _dtype_of(value), value.rows, value.columns, Affine(), first, last)


def _group_launches(group: Sequence[KernelCall], origin: Origin, moved: str, flops: str) -> list[Launch]:
    """The launches of a node: its costs are counted once, with the one that was predicted, else the first."""
    leader = next((i for i, call in enumerate(group) if call.seconds is not None), 0)
    costs = [(moved, flops) if i == leader else ("0", "0") for i in range(len(group))]
    return [_launch(call, origin, *cost) for call, cost in zip(group, costs, strict=True)]


def _launch(call: KernelCall, origin: Origin, moved: str, flops: str) -> Launch:
    function = call.kernel, call.family, call.dtypes, call.arguments
    moved = moved if call.moved is None else call.moved
    return Launch(*function, origin, moved, flops, call.grid, call.only, call.wanted, call.sides, seconds=call.seconds)


def _written(units: Sequence[Unit], kept: Sequence[View], views: Views) -> dict[Unit, tuple[Value, ...]]:
    """The values that each unit must leave in memory: a kernel must leave all of its values, a loop those that others
    read.

    kept: what the step leaves.
    """
    read = {view.value for unit in units for view in unit_reads(unit, views)} | {view.value for view in kept}
    written: dict[Unit, tuple[Value, ...]] = {}
    for unit in units:
        values: list[Value] = []
        for node in unit_nodes(unit):
            for view in views_of(node, views):
                if not isinstance(unit, Group) or view.value in read:
                    values.append(view.value)
        written[unit] = tuple(values)
    return written


def _buffers_of(launch: Launch) -> tuple[str, ...]:
    return tuple(a.name for a in launch.arguments.values() if isinstance(a, Operand) and a.space == "buffer")


def _loop_title(loop: Loop) -> str:
    """A few of the functions that the loop applies, for its name."""
    names = [
        s.function if isinstance(s, Apply) else s.reduction for s in loop.statements if isinstance(s, Apply | Reduce)
    ]
    return "_".join(n for n in dict.fromkeys(names) if not n.startswith("to_"))[:40].rstrip("_") or "copy"


def _dtype_of(value: Value) -> str:
    name = _CODES.get(value.dtype) or dtype_name(value.dtype)
    if name is None:
        raise unsupported(value.node, f"its result is {value.dtype}", "use float32, bfloat16 or float16")
    return name


def _buffer_name(value: Value) -> str:
    return value.node.name if value.index == 0 else f"{value.node.name}_result{value.index}"
