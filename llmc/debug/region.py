"""The part of a graph that one rewrite changed, cut out before and after, with its immediate readers and its inputs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.debug.memo_run import MemoRun, StepValues, written_arguments
from llmc.errors import PassError
from llmc.graph.execute import sequence_inputs
from llmc.graph.model_graph import ModelGraph
from llmc.graph.ranks import OnRanks, call, copied, weight_value
from llmc.graph.weights import WeightSource


@dataclass(frozen=True)
class Region:
    """A part of a graph that a rewrite changes. nodes: the calls of the region, in order. outputs: (name, node) of each
    value that the rest of the graph reads.

    renewed: names of inputs that hold something else after the rewrite than before: other weights, codes for numbers.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[tuple[str, fx.Node], ...]
    renewed: frozenset[str] = frozenset()

    def key(self, node: fx.Node) -> str:
        """The name of an input's value."""
        return f"{node.name}.after" if node.name in self.renewed else node.name

    def inputs(self) -> tuple[fx.Node, ...]:
        """The values that the region reads and does not compute, in order of use."""
        inside = set(self.nodes)
        return tuple(dict.fromkeys(n for node in self.nodes for n in node.all_input_nodes if n not in inside))


@dataclass(frozen=True)
class ChangedRegion:
    """A region before and after one rewrite; both have the same outputs, by name.

    inputs: the value of each input of either, by its key: a tensor, or a number for a symbolic size.
    """

    before: Region
    after: Region
    inputs: dict[str, Any]


def changed_region(before: ModelGraph, after: ModelGraph, runner: MemoRun, source: WeightSource) -> ChangedRegion:
    """The region that differs between two graphs of one pipeline, and its input values on the runner's tokens.

    Readers of changed values belong to the region, so that a rewrite that only writes memory has outputs to compare.
    Values are those of the graph before, in its last step.
    """
    old, new = ({n.name: n for n in g.graph.nodes if n.op != "output"} for g in (before, after))
    shared = [name for name in old if name in new]
    changed = [name for name in shared if _signature(old[name], before, runner) != _signature(new[name], after, runner)]
    gone = [n for name, n in old.items() if name not in new]
    added = [n for name, n in new.items() if name not in old]
    readers = {n.name for n in (*_memory_readers(gone), *_memory_readers(added))}
    renewed = frozenset(name for name in changed if old[name].op == "placeholder")
    readers |= {u.name for name in renewed for u in old[name].users}
    shown = [name for name in shared if (name in changed or name in readers) and name not in renewed]
    ends = [g.logits() for g in (before, after)]
    # A write gives no tensor that could be compared.
    pairs = [(name, old[name], new[name]) for name in shown if isinstance(old[name].meta.get("val"), Tensor)]
    if ends[0].name != ends[1].name or not pairs:
        pairs.append(("logits", ends[0], ends[1]))
    region = _region(before, [*gone, *(old[name] for name in shown)], [(name, node) for name, node, _ in pairs])
    other = _region(after, [*added, *(new[name] for name in shown)], [(name, node) for name, _, node in pairs], renewed)
    return ChangedRegion(region, other, _values(before, after, [region, other], runner, source))


def run_region(region: Region, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Run the region and return its outputs by name, except outputs that are split over ranks. Inputs that it writes
    are copied first. Raises PassError if it fails to run."""
    values: dict[fx.Node, Any] = {
        node: copied(value) if isinstance(value, Tensor | OnRanks) else value
        for node in region.inputs()
        for value in (inputs[region.key(node)],)
    }
    with torch.inference_mode():
        for node in region.nodes:
            arguments: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            target: Any = torch.ops.aten.reshape.default if node.target is torch.ops.aten.view.default else node.target
            try:
                values[node] = call(target, *arguments)
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
                raise PassError(f"node {node.name} does not run: {error}", at=node.format_node()) from error
    return {name: values[node] for name, node in region.outputs if not isinstance(values[node], OnRanks)}


def _signature(node: fx.Node, graph: ModelGraph, runner: MemoRun) -> tuple[Any, ...]:
    """The key by which nodes are equal. Weights are compared by content, because each run of the pipeline quantizes
    again. Sizes are compared, because a call on a rank's part is a different call."""
    recipe = graph.weights.get(node.name)
    value = node.meta.get("val")
    kind = (value.dtype, str(value.shape)) if isinstance(value, Tensor) and node.op == "placeholder" else None
    sizes = [size for size in value.shape if isinstance(size, int)] if isinstance(value, Tensor) else []
    known = runner.recipe_key(recipe) if recipe is not None else None
    return (node.op, str(node.target), str(node.args), str(node.kwargs), known, kind, sizes)


def _memory_readers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The calls that read what some nodes write, apart from those nodes."""
    written = [node.args[i] for node in nodes for i in written_arguments(node)]
    return [user for tensor in written if isinstance(tensor, fx.Node) for user in tensor.users]


def _region(
    graph: ModelGraph,
    nodes: list[fx.Node],
    outputs: list[tuple[str, fx.Node]],
    renewed: frozenset[str] = frozenset(),
) -> Region:
    wanted = {n for n in (*nodes, *(node for _, node in outputs)) if n.op == "call_function"}
    return Region(tuple(n for n in graph.graph.nodes if n in wanted), tuple(outputs), renewed)


def _values(
    before: ModelGraph, after: ModelGraph, regions: list[Region], runner: MemoRun, source: WeightSource
) -> dict[str, Any]:
    step = runner.steps(before)[-1]
    written = {
        argument.name
        for region in regions
        for node in region.nodes
        for index in written_arguments(node)
        if isinstance(argument := node.args[index], fx.Node)
    }
    values: dict[str, Any] = {}
    for region in regions:
        for node in region.inputs():
            if region.key(node) in values:
                continue
            if node.name in region.renewed:
                values[region.key(node)] = _renewed(node, after, runner, source)
            else:
                values[node.name] = _value(node, after, step, node.name in written, runner, source)
    return values


def _renewed(node: fx.Node, after: ModelGraph, runner: MemoRun, source: WeightSource) -> Any:
    """The value of an input after the rewrite: a weight, or a cache before the last step."""
    if node.name in after.weights:
        return weight_value(after.weights[node.name], source, after.ranks)
    return runner.steps(after)[-1].inputs[node.name].get()


def _value(
    node: fx.Node, after: ModelGraph, step: StepValues, is_written: bool, runner: MemoRun, source: WeightSource
) -> Any:
    """The value of an input; for a cache that the region writes, the value before the region."""
    if is_written and node.name in step.inputs:
        return step.inputs[node.name].get()
    if node.name in step.nodes:
        return step.nodes[node.name].get()
    if node.name in after.weights:
        return weight_value(after.weights[node.name], source, after.ranks)
    count = len(runner.tokens)
    declared = sequence_inputs(after, runner.tokens, chunk_sizes=(count,), block_size=runner.block_size)
    return declared[0][node.name]
