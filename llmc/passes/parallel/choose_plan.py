"""Choose the classes of axes to split, so that a step takes the least time on a number of ranks.

Each node costs what it reads and computes, divided among the ranks if it has a part on each, and what the collectives
cost that it then needs. Its cost depends on the few classes that it touches, so the sum of all is minimized exactly by
eliminating one class after the other, that with the fewest neighbours first (Bertelè and Brioschi 1972, "Nonserial
dynamic programming"): what remains of a class is a table over its neighbours.

The start of a collective costs a thousandth of the whole step rather than a time in seconds: ranks are also used for
their memory, even with small models, but a collective per small weight is not worth it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.cost import node_cost
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import A, C, L, R, T, record_of
from llmc.passes.parallel.propagate_placements import AxesClass, Placements
from llmc.passes.parallel.roles import Role, nbytes, roles, sum_of
from llmc.passes.parallel.split import Split, in_panels, split_class
from llmc.targets import gpu_target

# The step that is optimized: a decoding request, whose step reads all weights. More tokens raise the cost of both
# sides.
TOKENS = 1
_CONTEXT = 1024
# The split does not depend on the target: all targets have the same parts. Only ratios matter.
_GPU = gpu_target("h100")
_BEGINNING = 1e-3


@dataclass(frozen=True)
class Plan:
    """The classes of axes to cut. splits: the classes that are cut and their splits, in the order of the graph.
    whole_seconds, seconds: the time of a step without and with the splits, by the estimates of the choice."""

    splits: tuple[tuple[AxesClass, Split], ...]
    whole_seconds: float
    seconds: float


def choose_plan(
    graph: ModelGraph, placements: Placements, ranks: int, others: frozenset[fx.Node] = frozenset()
) -> Plan:
    """The classes of weights' axes that are worth to be cut. others: weights that are cut in another way."""
    splits = {
        axes: split
        for axes in placements.classes()
        if any(node.name in graph.weights for node, _ in axes.members)
        and not _is_input(graph, axes)
        and not any(node in others for node, _ in axes.members)
        and (split := split_class(axes, ranks)) is not None
        and (split := in_panels(axes, split)) is not None
    }
    costed_roles = [(role, _alone(role)) for role in roles(graph, placements)]
    whole = sum(alone for _, alone in costed_roles)
    links = _Collectives(ranks, _BEGINNING * whole)
    tables = [
        _table(graph, role, [axes for axes in role.classes() if axes in splits], alone, links)
        for role, alone in costed_roles
    ]
    chosen, seconds = _minimize(tables)
    of_rows = {axes for role, _ in costed_roles if _looks_up(role.node) for axes in role.sums}
    kept = tuple(
        (axes, replace(split, length=split.length + 1) if axes in of_rows else split)
        for axes, split in splits.items()
        if chosen.get(axes)
    )
    return Plan(kept, whole, seconds)


def _looks_up(node: fx.Node) -> bool:
    """Whether a node looks up rows of a table. A rank's part of the table then ends with a row of zeros."""
    record = record_of(node)
    return record is not None and record.table is not None


def _is_input(graph: ModelGraph, axes: AxesClass) -> bool:
    return any(node.op == "placeholder" and node.name not in graph.weights for node, _ in axes.members)


@dataclass(frozen=True)
class _Table:
    """Seconds by which of the classes are cut."""

    classes: tuple[AxesClass, ...]
    seconds: Mapping[tuple[bool, ...], float]


@dataclass(frozen=True)
class _Collectives:
    """Collectives between `ranks` ranks. beginning: seconds of latency."""

    ranks: int
    beginning: float

    def reduce(self, nbytes: int) -> float:
        """Return the seconds to sum values of `nbytes` bytes."""
        return self.beginning + 2 * self._moved(nbytes)

    def gather(self, nbytes: int) -> float:
        """Seconds until every rank has `nbytes` bytes, each rank starting with its part."""
        return self.beginning + self._moved(nbytes)

    def _moved(self, nbytes: int) -> float:
        return nbytes * (self.ranks - 1) / self.ranks / _GPU.links.of(self.ranks).bandwidth


def _table(graph: ModelGraph, role: Role, classes: Sequence[AxesClass], alone: float, links: _Collectives) -> _Table:
    seconds: dict[tuple[bool, ...], float] = {}
    for cut in itertools.product((False, True), repeat=len(classes)):
        chosen = {axes for axes, is_cut in zip(classes, cut, strict=True) if is_cut}
        seconds[cut] = _seconds(graph, role, chosen, alone, links)
    return _Table(tuple(classes), seconds)


def node_seconds(node: fx.Node, more_bytes: int = 0) -> float:
    """Seconds of a node in such a step on one rank, if it moves `more_bytes` in addition."""
    cost = node_cost(node)
    at = {T: TOKENS, L: TOKENS, R: TOKENS, C: TOKENS * _CONTEXT, A: TOKENS * _CONTEXT}
    return max(
        (float(cost.bytes_moved.subs(at)) + more_bytes) / _GPU.bandwidth, float(cost.flops.subs(at)) / _GPU.bf16_rate
    )


def _alone(role: Role) -> float:
    if role.node.op == "output":
        return 0.0
    record = record_of(role.node)
    # Few rows of a table are read, but all of them lie in memory.
    table = None if record is None or record.table is None else call_arguments(role.node)[record.table]
    return node_seconds(role.node, 0 if table is None else nbytes(table, TOKENS))


def _seconds(graph: ModelGraph, role: Role, cut: set[AxesClass], alone: float, links: _Collectives) -> float:
    """Seconds of a node on one rank, with the collectives that it needs; infinite if it is impossible."""
    shared = {*role.shares, *role.sums} & cut
    if len(shared) > 1:
        return math.inf
    seconds = alone / links.ranks if shared else alone
    for operand, axes in role.gathers:
        if axes in cut:
            if shared or operand.name in graph.weights:
                return math.inf
            seconds += links.gather(nbytes(operand, TOKENS))
    if any(class_ in cut for class_ in role.squares):
        seconds += links.reduce(4 * TOKENS)
    if any(class_ in cut for class_ in role.barred):
        return math.inf
    if any(class_ in cut for class_ in role.sums):
        seconds += links.reduce(nbytes(sum_of(role.node), TOKENS))
    return seconds


def _minimize(tables: Sequence[_Table]) -> tuple[dict[AxesClass, bool], float]:
    """Return the classes to cut for the least sum, and that sum."""
    left = list(tables)
    undo: list[tuple[AxesClass, tuple[AxesClass, ...], dict[tuple[bool, ...], bool]]] = []
    waiting = dict.fromkeys(key for table in left for key in table.classes)
    while waiting:
        neighbours = {key: _neighbours(key, left) for key in waiting}
        key = min(waiting, key=lambda key: len(neighbours[key]))
        del waiting[key]
        others = neighbours[key]
        mine = [table for table in left if key in table.classes]
        left = [table for table in left if key not in table.classes]
        best: dict[tuple[bool, ...], bool] = {}
        sums: dict[tuple[bool, ...], float] = {}
        for cut in itertools.product((False, True), repeat=len(others)):
            fixed = dict(zip(others, cut, strict=True))
            options = [_sum(mine, {**fixed, key: is_cut}) for is_cut in (False, True)]
            best[cut], sums[cut] = options[1] < options[0], min(options)
        undo.append((key, others, best))
        left.append(_Table(others, sums))
    chosen: dict[AxesClass, bool] = {}
    for key, others, best in reversed(undo):
        chosen[key] = best[tuple(chosen[other] for other in others)]
    return chosen, _sum(left, {})


def _sum(tables: Sequence[_Table], cut: Mapping[AxesClass, bool]) -> float:
    return sum(table.seconds[tuple(cut[key] for key in table.classes)] for table in tables)


def _neighbours(key: AxesClass, tables: Sequence[_Table]) -> tuple[AxesClass, ...]:
    """The classes that share a table with one."""
    neighbours = (axes for table in tables if key in table.classes for axes in table.classes if axes is not key)
    return tuple(dict.fromkeys(neighbours))
