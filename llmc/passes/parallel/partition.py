"""Give each of several ranks a part of the weights, and let them exchange what no rank has alone.

    linear(x, w, b)              ->  linear(x, w[rank's rows], b[rank's rows])                          (columns of y)
    linear(x, w, b)              ->  all_reduce(linear(x's part, w[:, rank's columns])) + b             (parts of a sum)
    embedding(ids, w)            ->  all_reduce(embedding(rank_rows(ids, first), w[rank's rows and one of zeros]))
    rms_norm(x)                  ->  x's part * rsqrt(all_reduce(sum of x's part's squares) / channels + eps) * w's part
    norm(x), the output          ->  norm(all_gather(x's part)), all_gather(logits' part)
    sum_experts(expert_linear(…)) ->  all_reduce(sum_experts(expert_linear(…))), of parts of each expert's channels
All ranks run one graph on weights of the same shapes; propagate_placements finds the axes that must be split together
from the ops' records, and choose_plan those that are worth splitting by their costs. Each class of axes is one rewrite.
Heads, groups of codes and rows that do not divide are padded with zeros, which do not change the sums that follow. If
there are fewer KV heads than ranks, several ranks hold the same one. Must have: the option tensor_parallel_size;
without it there is nothing to do.
Numerics: reorder, since sums over parts are added up in the order of ranks.
Source: Shoeybi et al. 2019, "Megatron-LM"; Xu et al. 2021, "GSPMD".
"""

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Constant, Derived, PerRank
from llmc.options import BuildOptions
from llmc.passes.parallel.choose_plan import Plan, choose_plan
from llmc.passes.parallel.mixtures import divided_by_expert
from llmc.passes.parallel.norm_parts import channel_shares, norm_parts
from llmc.passes.parallel.propagate_placements import AxesClass, NodeAxis, Placements
from llmc.passes.parallel.refuse_states import refuse_states
from llmc.passes.parallel.resized_axes import resize_calls, resize_values
from llmc.passes.parallel.roles import Role, roles, sum_of
from llmc.passes.parallel.split import Split, most_ranks
from llmc.passes.parallel.why_whole import whole_matrices
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

aten, _llmc = torch.ops.aten, torch.ops.llmc


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Cut the classes that are worth it, in the order of the graph."""
    ranks = options.tensor_parallel_size
    if ranks == 1 or graph.ranks > 1:
        return
    refuse_states(graph, "tensor_parallel_size", ranks)
    placements = Placements(graph)
    divided = divided_by_expert(graph) if options.enable_expert_parallel else frozenset()
    plan = choose_plan(graph, placements, ranks, divided)
    all_roles = roles(graph, placements)
    members: dict[AxesClass, list[Role]] = {class_: [] for class_, _ in plan.splits}
    for role in all_roles:
        for axes in role.classes():
            if axes in members:
                members[axes].append(role)
    for refusal in whole_matrices(graph, placements, all_roles, list(members), ranks):
        if refusal.node not in divided:
            log.refuse(refusal)
    if not plan.splits:
        raise PassError(
            f"no part of the model can be divided among {ranks} ranks",
            at=graph.info.name,
            fix="build with tensor_parallel_size=1",
        )
    _check_all_have_some(graph, plan, ranks)
    graph.ranks = ranks
    for axes, split in plan.splits:
        cut = _Cut(graph, placements, axes, split)
        log.step(cut.summary(), *(role.node for role in members[axes] if role.node.op != "output"))
        cut.apply(members[axes])


partition = GraphPass("partition", run, Numerics.REORDER, unproved="it makes what one rank of several computes")


def _check_all_have_some(graph: ModelGraph, plan: Plan, ranks: int) -> None:
    """Raise PassError if a rank would hold only padding of a class, usually of heads."""
    idle = [(class_, split.idle) for class_, split in plan.splits if split.idle]
    if not idle:
        return
    axes, without = max(idle, key=lambda pair: pair[1])
    name = next(node.name for node, _ in axes.members if node.name in graph.weights)
    most = most_ranks([class_ for class_, _ in plan.splits], ranks)
    raise PassError(
        f"{ranks} tensor ranks are more than can be used: the {axes.size} elements of {name} that would be cut are in "
        f"{ranks - without} parts that stay together, such as heads, and {without} of the ranks would get none",
        at=f"tensor_parallel_size={ranks}",
        fix=f"the maximum is tensor_parallel_size={most}",
    )


@dataclass(frozen=True)
class _Cut:
    """One class of axes, and how it is split."""

    graph: ModelGraph
    placements: Placements
    axes: AxesClass
    split: Split

    def summary(self) -> str:
        """The split axes, for the record of rewrites."""
        weights = [node.name for node, _ in self.axes.members if node.name in self.graph.weights]
        shown = ", ".join(weights[:4]) + (" …" if len(weights) > 4 else "")
        parts = sorted({stop - start for start, stop in self.split.spans}, reverse=True)
        padded = "" if not self.split.padding else f", padded to {self.split.length}"
        return f"cut {self.axes.size} elements of {shown} into parts of {' and '.join(map(str, parts))}{padded}"

    def apply(self, members: list[Role]) -> None:
        """Rewrite all that touches the class; what the graph returns stays the same."""
        whole = {role.node for role in members if self.axes in role.takes}
        for node, axis in self.axes.members:
            if node.name in self.graph.weights:
                self._cut_weight(node, axis)
        resize_values(self.axes, self._length, whole)
        # Runs before gathered operands are replaced by their parts or norms.
        for role in members:
            self._gather(role)
        for role in members:
            self._rewrite(role)
        resize_calls(self.graph, self.placements, self.axes, self._length, whole)

    def _cut_weight(self, node: fx.Node, axis: int) -> None:
        split, runs = self._split(node, axis), self.placements.scale(node, axis).runs
        recipe = self.graph.weights[node.name]
        of_runs = () if runs == 1 else (runs,)
        own = [Derived(_llmc.rank_part.default, (recipe, axis, *s, split.length, *of_runs)) for s in split.spans]
        self.graph.weights[node.name] = PerRank(tuple(own))

    def _gather(self, role: Role) -> None:
        for operand, axes in role.gathers:
            if axes is self.axes:
                role.node.replace_input_with(operand, self._gathered(operand, role.node))

    def _rewrite(self, role: Role) -> None:
        node = role.node
        if self.axes in role.squares:
            self._norm_parts(node)
        if self.axes in role.takes:
            self._take(node)
        if self.axes in role.sums:
            self._sum(node)

    def _sum(self, node: fx.Node) -> None:
        """Make the node's result a part of a sum; its bias is added once."""
        arguments = call_arguments(node)
        bias = arguments.get("bias")
        end = sum_of(node)
        if node.target is _llmc.embedding.default:
            self._look_up_own(node)
        elif bias is not None and not (end is node and bias.meta["val"].shape[-1] == node.meta["val"].shape[-1]):
            self._add_on_the_first(node, bias)
            bias = None
        elif bias is not None:
            node.args = tuple(None if name == "bias" else value for name, value in arguments.items())
        with self.graph.graph.inserting_after(end):
            total = self.graph.graph.call_function(_llmc.all_reduce.default, (end, self.graph.ranks))
        last = total
        if bias is not None:
            with self.graph.graph.inserting_after(total):
                last = self.graph.graph.call_function(aten.add.Tensor, (total, bias))
            with self.graph.graph.inserting_after(last):
                cast = self.graph.graph.call_function(aten._to_copy.default, (last,), {"dtype": node.meta["val"].dtype})
            last = cast if last.meta["val"].dtype is not node.meta["val"].dtype else last
        end.replace_all_uses_with(last, delete_user_cb=lambda user: user is not total)

    def _add_on_the_first(self, node: fx.Node, bias: fx.Node) -> None:
        """Let only the first rank's product add its bias, if the bias is not per row, or if ops follow before the
        sum."""
        recipe, value = self.graph.weights[bias.name], bias.meta["val"]
        length = value.shape[0]
        stops = (length, *(0,) * (self.graph.ranks - 1))
        own = PerRank(tuple(Derived(_llmc.rank_part.default, (recipe, 0, 0, stop, length)) for stop in stops))
        node.replace_input_with(bias, new_weight(self.graph, f"{bias.name}_once", own, value))

    def _norm_parts(self, node: fx.Node) -> None:
        split = self._split(node, self._axis(node))
        shares = channel_shares(split)
        constant = None if shares is None else self._constant(f"{node.name}_shares", shares)
        norm_parts(self.graph, node, split.spans[-1][1], constant)

    def _look_up_own(self, node: fx.Node) -> None:
        """Ids of other ranks' rows look up the zeros that follow a rank's own."""
        arguments = call_arguments(node)
        split = self._split(arguments["weight"], 0)
        starts = [torch.tensor([start], dtype=torch.int32) for start, _ in split.spans]
        first = self._constant(f"{arguments['weight'].name}_first", starts)
        with self.graph.graph.inserting_before(node):
            ids = self.graph.graph.call_function(_llmc.rank_rows.default, (arguments["ids"], first, split.length - 1))
        node.replace_input_with(arguments["ids"], ids)

    def _take(self, node: fx.Node) -> None:
        """Select each rank's part of the whole result; padding repeats the first channel."""
        axis = self._axis(node)
        split = self._split(node, axis)
        order = [
            torch.tensor([*range(*span)] + [0] * (split.length - (span[1] - span[0])), dtype=torch.int32)
            for span in split.spans
        ]
        constant = self._constant(f"{node.name}_part", order)
        with self.graph.graph.inserting_after(node):
            selected = self.graph.graph.call_function(_llmc.select_channels.default, (node, constant))
        node.replace_all_uses_with(selected, delete_user_cb=lambda user: user is not selected)

    def _gathered(self, operand: fx.Node, reader: fx.Node) -> fx.Node:
        for user in operand.users:
            if user.target is _llmc.all_gather.default:
                return user
        stops = [stop for _, stop in self._split(operand, self._axis(operand)).spans]
        ends = self._constant(f"{operand.name}_ends", [torch.tensor(stops, dtype=torch.int32)])
        with self.graph.graph.inserting_before(reader):
            return self.graph.graph.call_function(_llmc.all_gather.default, (operand, ends, stops[-1]))

    def _constant(self, name: str, values: list[Tensor]) -> fx.Node:
        """A weight with these values by rank, or a single one for all."""
        own = tuple(map(Constant, values))
        like = self.graph.inputs()[0].meta["val"].new_empty(values[0].shape, dtype=values[0].dtype)
        return new_weight(self.graph, name, own[0] if len(own) == 1 else PerRank(own), like)

    def _axis(self, node: fx.Node) -> int:
        value: Tensor = node.meta["val"]
        return next(axis for axis in range(value.dim()) if self.placements.find(node, axis) is self.axes)

    def _split(self, node: fx.Node, axis: int) -> Split:
        return self.split.of(self.placements.scale(node, axis))

    def _length(self, place: NodeAxis) -> int:
        return self._split(*place).length * self.placements.scale(*place).runs
