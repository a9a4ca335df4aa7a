"""Split a model into pipeline stages, each on its own ranks.

    y = f(x)  ->  y = f(hand_over(x, 1))           where stage 1 begins
A cut is a place in the order of the graph. Values computed before it and read after it cross it: rows of hidden
states. Values that depend only on step inputs, such as the angles of rotations, are computed again in each stage
instead. Candidates are the places where the fewest bytes cross, usually in the residual stream. Among them the cuts are
chosen that minimize the time of the slowest stage, by the cost model. Each cut is one rewrite. Must have: the option
pipeline_parallel_size; a layer that attends for each stage.
Numerics: exact; hand_over changes nothing.
Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, fx

from llmc.errors import PassError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import Part
from llmc.graph.product_parts import part_of
from llmc.graph.propagate import token_count
from llmc.options import BuildOptions
from llmc.passes.parallel.choose_plan import node_seconds
from llmc.passes.parallel.refuse_states import refuse_states
from llmc.passes.parallel.roles import nbytes
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import same_size

_llmc = torch.ops.llmc


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Cut in the order of the graph."""
    stages = options.pipeline_parallel_size
    if stages == 1 or graph.pipeline_stages > 1:
        return
    refuse_states(graph, "pipeline_parallel_size", stages)
    order = [node for node in graph.graph.nodes if node.op == "call_function"]
    places = _places(graph, order)
    cuts = _choose(order, places, stages)
    if cuts is None:
        most = _most_stages(order, places)
        layers = sum(map(_attends, order))
        raise PassError(
            f"the model cannot be cut into {stages} stages: {layers} of its layers attend, and each stage needs one",
            at=f"pipeline_parallel_size={stages}",
            fix=f"the maximum is pipeline_parallel_size={most}",
        )
    ends = [place.end for place in cuts]
    shares = _shares(order, [0, *ends, len(order)])
    latest: dict[fx.Node, fx.Node] = {}
    for number, place in enumerate(cuts, 1):
        names = ", ".join(node.name for node in place.crossing)
        log.step(
            f"begin stage {number} after {names}: {place.nbytes} bytes per token cross; {shares[number]:.0%} of the "
            f"step's time follow up to the next, {shares[number - 1]:.0%} come before",
            *place.crossing,
        )
        _cut(graph, order, place, number, latest)


cut_stages = GraphPass("cut_stages", run, Numerics.EXACT, unproved="it makes what one rank of several computes")


@dataclass(frozen=True)
class _Place:
    """A place between two nodes in the graph's order. crossing: values computed before and read after it."""

    end: int
    crossing: tuple[fx.Node, ...]

    @property
    def nbytes(self) -> int:
        """Bytes per token."""
        return sum(nbytes(node, 1) for node in self.crossing)


def _places(graph: ModelGraph, order: Sequence[fx.Node]) -> list[_Place]:
    """Return the places at which all values that cross have a row of numbers per token."""
    index = {node: i for i, node in enumerate(order)}
    again = _computed_again(graph)
    last = {
        node: max((index.get(user, len(order)) for user in node.users), default=-1)
        for node in order
        if node not in again
    }
    places, living = [], dict[fx.Node, None]()
    for end, node in enumerate(order, 1):
        if node in last:
            living[node] = None
        living = {value: None for value in living if last[value] >= end}
        if living and all(_has_token_rows(graph, value) for value in living):
            places.append(_Place(end, tuple(living)))
    return places


def _has_token_rows(graph: ModelGraph, node: fx.Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or value.dim() < 2:
        return False
    first, *others = value.shape
    return same_size(first, token_count(graph)) and all(isinstance(size, int) for size in others)


def _choose(order: Sequence[fx.Node], places: Sequence[_Place], stages: int) -> list[_Place] | None:
    """The cuts, of the cheapest places with which there are enough; None if there are not."""
    for most in sorted({place.nbytes for place in places}):
        few = [place for place in places if place.nbytes <= most]
        if _most_stages(order, few) >= stages:
            return _balanced(order, few, stages)
    return None


def _most_stages(order: Sequence[fx.Node], places: Sequence[_Place]) -> int:
    """The maximum number of stages, each with a layer that attends."""
    layers = list(accumulate(map(_attends, order), initial=0))
    stages, reached = 1, 0
    for place in places:
        if reached < layers[place.end] < layers[-1]:
            stages, reached = stages + 1, layers[place.end]
    return stages


def _balanced(order: Sequence[fx.Node], places: Sequence[_Place], stages: int) -> list[_Place]:
    """Cuts for which the longest stage is shortest; of several such, the first ones."""
    seconds = list(accumulate((node_seconds(node) for node in order), initial=0.0))
    layers = list(accumulate(map(_attends, order), initial=0))
    ends = [0, *(place.end for place in places), len(order)]
    # By the cut that a stage ends with: the longest stage up to there, and the cut before.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, int]] = {}
        for end in range(1, len(ends)) if stage < stages else (len(ends) - 1,):
            options = [
                (max(longest, seconds[ends[end]] - seconds[ends[start]]), start)
                for start, (longest, _) in best[-1].items()
                if start < end and layers[ends[start]] < layers[ends[end]]
            ]
            if options:
                row[end] = min(options)
        best.append(row)
    chosen, end = list[_Place](), len(ends) - 1
    for row in reversed(best[2:]):
        end = row[end][1]
        chosen.append(places[end - 1])
    return chosen[::-1]


def _shares(order: Sequence[fx.Node], ends: Sequence[int]) -> list[float]:
    """Shares of a step's time, by stage."""
    seconds = list(accumulate((node_seconds(node) for node in order), initial=0.0))
    parts = [seconds[end] - seconds[start] for start, end in pairwise(ends)]
    return [part / seconds[-1] if seconds[-1] else 0.0 for part in parts]


def _cut(
    graph: ModelGraph, order: Sequence[fx.Node], place: _Place, number: int, latest: dict[fx.Node, fx.Node]
) -> None:
    """latest: what stands for a value after the cut before; from now on, after this one."""
    behind = {*order[place.end :], graph.graph.output_node()}
    with graph.graph.inserting_before(order[place.end]):
        for node in place.crossing:
            before = latest.get(node, node)
            handed = graph.graph.call_function(_llmc.hand_over.default, (before, number))
            before.replace_all_uses_with(handed, delete_user_cb=behind.__contains__)
            latest[node] = handed
    graph.pipeline_stages = number + 1


def _attends(node: fx.Node) -> bool:
    return node.target is _llmc.attention.default


def _computed_again(graph: ModelGraph) -> set[fx.Node]:
    """Return the values that depend only on step inputs and vectors, which are cheaper to compute in each stage than to
    hand over, and the matrices that codes stand for, which several stages read if an embedding is tied."""
    weights = set(graph.weight_nodes())
    known = {*graph.inputs(), *(node for node in weights if node.meta["val"].dim() < 2)}
    again = set[fx.Node]()
    for node in graph.graph.nodes:
        if node.op == "call_function" and known.issuperset(node.all_input_nodes):
            known.add(node)
            again.add(node)
        elif part_of(node) is Part.STORAGE and weights.issuperset(node.all_input_nodes):
            again.add(node)
    return again
