"""Give each of several ranks some of the experts, and add up what all of them yield.

    sum_experts(expert_linear(gate(expert_linear(x, w, i)), v, i), p)  ->  all_reduce(sum_experts(…)), where each rank
        has its experts of w and v, and i counts from the first of them
An index of another rank's expert yields zeros, so that every token's sum is the sum of all ranks' parts. If experts do
not divide, the last ranks have fewer and are padded with zeros. Must have: the option enable_expert_parallel, and
ranks, no more than experts; without the option there is nothing to do, and partition cuts the channels of all experts.
Between the products there may be only what works on each slot by itself, and all that comes out is summed.
Numerics: reorder, since a token's experts are added up in the order of ranks.
"""

import torch
from torch import Tensor, fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant, Derived, PerRank, is_per_rank
from llmc.options import BuildOptions
from llmc.passes.parallel.mixtures import between, mixtures, not_divisible, weights_of
from llmc.passes.parallel.split import Split, even_split
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

aten, _llmc = torch.ops.aten, torch.ops.llmc


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    ranks = options.tensor_parallel_size
    if ranks == 1 or not options.enable_expert_parallel:
        return
    for index, mixture in mixtures(graph):
        refusal = not_divisible(graph, mixture)
        if refusal is not None:
            log.refuse(refusal)
        elif not any(is_per_rank(graph.weights[weight.name]) for weight in weights_of(graph, mixture[0])):
            experts = call_arguments(mixture[0])["experts"]
            _check_all_have_some(experts, ranks)
            log.step(f"{experts} experts of {_names(graph, mixture)} on {ranks} ranks", *mixture)
            graph.ranks = ranks
            _share(graph, index, mixture, even_split(experts, ranks))


partition_experts = GraphPass(
    "partition_experts", _run, Numerics.REORDER, Stage.CANONICAL, unproved="it makes what one rank of several computes"
)


def _check_all_have_some(experts: int, ranks: int) -> None:
    if experts < ranks:
        raise PassError(
            f"{ranks} tensor ranks are more than can be used: a layer's {experts} experts leave "
            f"{ranks - experts} of them none",
            at=f"tensor_parallel_size={ranks}",
            fix=f"the maximum is tensor_parallel_size={experts}; without enable_expert_parallel, each "
            "rank has some channels of all experts",
        )


def _names(graph: ModelGraph, mixture: tuple[fx.Node, ...]) -> str:
    return ", ".join(weight.name for product in mixture for weight in weights_of(graph, product)[:1])


def _share(graph: ModelGraph, index: fx.Node, mixture: tuple[fx.Node, ...], split: Split) -> None:
    firsts = [torch.tensor([start], dtype=torch.int32) for start, _ in split.spans]
    first = new_weight(graph, f"{index.name}_first", PerRank(tuple(map(Constant, firsts))), firsts[0].new_empty(1))
    with graph.graph.inserting_before(mixture[0]):
        own = graph.graph.call_function(aten.sub.Tensor, (index, first))
    sums: dict[fx.Node, None] = {}
    for product in mixture:
        arguments = call_arguments(product)
        for part in weights_of(graph, product):
            _cut_rows(graph, part, arguments["experts"], split)
        weight = arguments["weight"]
        if weight.name not in graph.weights:
            weight.meta["val"] = graph.fakes.of(weight)
        changed = arguments | {"index": own, "experts": split.length}
        product.args = tuple(changed.values())
    for node in (*mixture, *between(mixture)):
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
