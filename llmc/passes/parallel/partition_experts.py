"""Give each of several ranks some of the experts, and add up what all of them yield.

    sum_experts(expert_linear(gate(expert_linear(x, w, i)), v, i), p)  ->  all_reduce(sum_experts(…)), where each rank
        has its experts of w and v, and i counts from the first of them
An index that is no expert of a rank yields zeros there, so that every token's sum is made of all ranks' parts. Where
experts do not divide, the last ranks have fewer; what fills them up is zero, too.
Must have: the option enable_expert_parallel, and ranks, no more than experts; without the option there is nothing to
do. Between the products there
may be only what works on each slot by itself, and all that comes out is summed.
Numerics: reorder, since a token's experts are added up in the order of ranks.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import Part, record_of
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant, Derived, PerRank, is_per_rank
from llmc.options import BuildOptions
from llmc.passes.parallel.split import Split, even_split
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

aten, _llmc = torch.ops.aten, torch.ops.llmc


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    ranks = options.tensor_parallel_size
    if ranks == 1 or not options.enable_expert_parallel:
        return
    products = [node for node in graph.graph.nodes if node.target is _llmc.expert_linear.default]
    for index, found in groupby(products, key=lambda node: call_arguments(node)["index"]):
        mixture = tuple(found)
        refusal = _refusal(graph, mixture)
        if isinstance(refusal, Refusal):
            log.refuse(refusal)
        elif not any(is_per_rank(graph.weights[weight.name]) for weight in _weights(graph, mixture[0])):
            experts = call_arguments(mixture[0])["experts"]
            _check_all_have_some(experts, ranks)
            log.step(f"{experts} experts of {_names(graph, mixture)} on {ranks} ranks", *mixture)
            graph.ranks = ranks
            _share(graph, index, mixture, even_split(experts, ranks))


partition_experts = GraphPass("partition_experts", _run, Numerics.REORDER, Stage.CANONICAL)


def _check_all_have_some(experts: int, ranks: int) -> None:
    if experts < ranks:
        raise PassError(
            f"{ranks} tensor ranks are more than can be used: a layer's {experts} experts leave "
            f"{ranks - experts} of them none",
            at=f"tensor_parallel_size={ranks}",
            fix=f"the most that can be used is tensor_parallel_size={experts}; without enable_expert_parallel, all "
            "ranks have all experts",
        )


def _names(graph: ModelGraph, mixture: tuple[fx.Node, ...]) -> str:
    return ", ".join(weight.name for product in mixture for weight in _weights(graph, product)[:1])


def _weights(graph: ModelGraph, product: fx.Node) -> list[fx.Node]:
    """The placeholders with a run of rows for each expert: a dense weight, or the parts of a stored one; and a bias."""
    arguments = call_arguments(product)
    weight, bias = arguments["weight"], arguments["bias"]
    record = record_of(weight) if weight.name not in graph.weights else None
    parts = [weight] if record is None else [call_arguments(weight)[name] for name in record.rows]
    return [part for part in (*parts, bias) if part is not None]


def _refusal(graph: ModelGraph, mixture: tuple[fx.Node, ...]) -> Refusal | None:
    for product in mixture:
        weight = call_arguments(product)["weight"]
        record = record_of(weight)
        if weight.name not in graph.weights and (record is None or record.part is not Part.STORAGE):
            return Refusal(f"its weight comes from {weight.name}, which no rank can have a part of", product)
        for part in _weights(graph, product):
            if len(part.users) > 1:
                return Refusal(f"{part.name} is used elsewhere, too", product)
    for node in _between(mixture):
        value = node.meta["val"]
        if not isinstance(value, Tensor) or value.shape[:2] != mixture[0].meta["val"].shape[:2]:
            return Refusal(f"{node.name} does not work on each slot by itself", node)
    return None


def _between(mixture: tuple[fx.Node, ...]) -> list[fx.Node]:
    """All that reads what the products yield, up to the sums."""
    found: dict[fx.Node, None] = {}
    left = list(mixture)
    while left:
        for user in left.pop().users:
            if user.target is not _llmc.sum_experts.default and user not in found:
                found[user] = None
                left.append(user)
    return list(found)


def _share(graph: ModelGraph, index: fx.Node, mixture: tuple[fx.Node, ...], split: Split) -> None:
    firsts = [torch.tensor([start], dtype=torch.int32) for start, _ in split.spans]
    first = new_weight(graph, f"{index.name}_first", PerRank(tuple(map(Constant, firsts))), firsts[0].new_empty(1))
    with graph.graph.inserting_before(mixture[0]):
        own = graph.graph.call_function(aten.sub.Tensor, (index, first))
    sums: dict[fx.Node, None] = {}
    for product in mixture:
        arguments = call_arguments(product)
        for part in _weights(graph, product):
            _cut_rows(graph, part, arguments["experts"], split)
        weight = arguments["weight"]
        if weight.name not in graph.weights:
            weight.meta["val"] = graph.fakes.of(weight)
        changed = arguments | {"index": own, "experts": split.length}
        product.args = tuple(changed.values())
    for node in (*mixture, *_between(mixture)):
        sums |= dict.fromkeys(user for user in node.users if user.target is _llmc.sum_experts.default)
    for node in sums:
        with graph.graph.inserting_after(node):
            total = graph.graph.call_function(_llmc.all_reduce.default, (node, graph.ranks))
        node.replace_all_uses_with(total)
        total.update_arg(0, node)


def _cut_rows(graph: ModelGraph, weight: fx.Node, experts: int, split: Split) -> None:
    value: Tensor = weight.meta["val"]
    rows = value.shape[0] // experts
    recipe, length = graph.weights[weight.name], split.length * rows
    spans = [(start * rows, stop * rows) for start, stop in split.spans]
    own = [Derived(_llmc.rank_part.default, (recipe, 0, *span, length)) for span in spans]
    graph.weights[weight.name] = PerRank(tuple(own))
    weight.meta["val"] = value.new_empty([length, *value.shape[1:]])
