"""The part of each weight that a rank holds and the reason, the collectives, and the weights that every rank holds."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import record_of
from llmc.graph.pass_record import PassRecord
from llmc.graph.render import op_name
from llmc.graph.weights import Derived, PerRank, Recipe, stored_names
from llmc.passes.parallel.why_whole import reason_of
from llmc.plural import counted
from llmc.prediction.collectives import CANDIDATE_BYTES
from llmc.report.placements.record import PlacedCollective, PlacedWeight, Placements

_PARTITIONS = ("partition", "partition_experts")
_NUMBER = re.compile(r"(?<=[._])\d+(?=[._])")
_COLLECTIVES = ("llmc.all_reduce", "llmc.all_gather")


class PlacementObserver:
    """Observes the partitions of a pipeline. placements: None for a single rank. stages: number of pipeline stages."""

    def __init__(self, stages: int = 1) -> None:
        self.placements: Placements | None = None
        self._stages = stages
        self._refusals: list[str] = []

    def __call__(self, record: PassRecord, graph: ModelGraph) -> None:
        """Record the placements after a pass."""
        if record.name in _PARTITIONS and graph.ranks > 1:
            self._refusals += [refusal.reason for refusal in record.refusals]
            self.placements = placements(graph, self._refusals, stages=self._stages)


def placements(graph: ModelGraph, refusals: Sequence[str], *, stages: int = 1) -> Placements:
    """The placements of a graph right after the partition. refusals: the reasons for weights left whole. stages: as for
    PlacementObserver; with more than one, ranks gather all logits."""
    weights = Counter(_placed(graph, node, refusals) for node in graph.weight_nodes())
    collectives = Counter(_collectives(graph, may_choose=stages == 1))
    return Placements(
        graph.ranks,
        tuple(replace(weight, count=count) for weight, count in weights.items() if weight is not None),
        tuple(replace(collective, count=count) for collective, count in collectives.items()),
    )


def _placed(graph: ModelGraph, node: fx.Node, refusals: Sequence[str]) -> PlacedWeight | None:
    """Return the weight's placement; None for the small constants that the partition adds."""
    recipe, value = graph.weights[node.name], node.meta["val"]
    shape, nbytes = tuple(map(int, value.shape)), value.numel() * value.dtype.itemsize
    name = weight_name(node, recipe)
    if not isinstance(recipe, PerRank):
        if not stored_names(recipe) and len(shape) < 2:
            return None
        why = "a vector, for channels that all ranks have" if len(shape) < 2 else reason_of(node, refusals) or ""
        return PlacedWeight(name, 1, shape, None, (), 0, int(nbytes), why)
    first = recipe.recipes[0]
    if not isinstance(first, Derived) or op_name(first.target) != "llmc.rank_part":
        return None
    axis = int(first.args[1])
    spans = [(int(part.args[2]), int(part.args[3])) for part in recipe.recipes if isinstance(part, Derived)]
    # A rank holds a part of the gate and a part of the matrix it gates, or a part of each expert.
    runs = int(first.args[5]) if len(first.args) > 5 else 1
    whole = tuple(runs * max(stop for _, stop in spans) if i == axis else size for i, size in enumerate(shape))
    parts = tuple(runs * (stop - start) for start, stop in spans)
    why = _why(node, axis, parts, runs) + _sharing(spans)
    return PlacedWeight(name, 1, whole, axis, parts, shape[axis], int(nbytes), why, runs)


def weight_name(node: fx.Node, recipe: Recipe) -> str:
    """Return a weight's name in the checkpoint, or in the graph, with * for the numbers of layers."""
    names = stored_names(recipe)
    return _NUMBER.sub("*", names[0] if names else node.name)


def _why(weight: fx.Node, axis: int, parts: tuple[int, ...], runs: int) -> str:
    """Describe what each kind of reader does with its part. An embedding may also be the output matrix."""
    return "; ".join(dict.fromkeys(_reason(weight, reader, axis, parts, runs) for reader in _readers(weight)))


def _reason(weight: fx.Node, reader: fx.Node, axis: int, parts: tuple[int, ...], runs: int) -> str:
    record = record_of(reader)
    if record is not None and record.table is not None:
        return "rows of the vocabulary: ids of other ranks look up zeros, and all_reduce adds up"
    if len(weight.meta["val"].shape) == 1 and not any(parts[1:]):
        return "a bias of parts of sums: the first rank adds it, the others add zeros"
    if len(weight.meta["val"].shape) == 1:
        return "a vector, cut with the channels that it is for"
    if axis == 1:
        return "columns, as x arrives: each rank has a part of the sums, and all_reduce adds up"
    gathered = any(op_name(user.target) == _COLLECTIVES[1] for user in reader.users)
    if op_name(reader.target) == "llmc.expert_linear":
        return "rows: each rank has some " + ("of the experts" if runs == 1 else "channels of each expert's result")
    return "rows: each rank has some channels of the result" + (", and all_gather joins them" if gathered else "")


def _sharing(spans: list[tuple[int, int]]) -> str:
    most = max(Counter(spans).values())
    return f"; {counted(most, 'rank')} keep the same" if most > 1 else ""


def _readers(weight: fx.Node) -> Iterator[fx.Node]:
    """The ops that a weight is for, after those that only decode it."""
    for user in weight.users:
        record = record_of(user)
        if record is None or record.part is None:
            yield user
        else:
            yield from _readers(user)


def _collectives(graph: ModelGraph, *, may_choose: bool) -> Iterator[PlacedCollective]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and op_name(node.target) in _COLLECTIVES:
            of = _origin(graph, call_arguments(node)["x"])
            of_logits = op_name(node.target) == _COLLECTIVES[1] and node is graph.logits()
            chosen = CANDIDATE_BYTES * graph.ranks if of_logits and may_choose else None
            name = op_name(node.target).removeprefix("llmc.")
            yield PlacedCollective(name, of, 1, _row_bytes(node.meta["val"]), chosen)


def _origin(graph: ModelGraph, node: fx.Node) -> str:
    """The weight of the product whose parts a collective brings together, or what they are."""
    for operand in node.all_input_nodes:
        base = operand
        while base.op == "call_function" and (record := record_of(base)) is not None and record.part is not None:
            base = base.all_input_nodes[0]
        if base.name in graph.weights and base.meta["val"].dim() > 1:
            return f"{op_name(node.target).removeprefix('llmc.')} with {weight_name(base, graph.weights[base.name])}"
    return _NUMBER.sub("*", op_name(node.target))


def _row_bytes(value: Any) -> int:
    assert isinstance(value, Tensor)
    sizes = [size for size in value.shape if isinstance(size, int)]
    return math.prod(sizes) * value.dtype.itemsize
