"""Find the paths that an attention's values take from the product that makes them to the one that sums over them.

    o(reshape(attention(q, k, reshape(v(x)))))
Nothing else reads what is between, so a matrix for each KV head can be folded into the weights of v and of o.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal, Refused
from llmc.graph.weights import stored_names
from llmc.passes.uses import call_of

_ATTENTION = torch.ops.llmc.attention.default
_LINEAR = torch.ops.llmc.linear.default
_RESHAPE = torch.ops.aten.reshape.default


@dataclass(frozen=True)
class ValuePath:
    """The nodes of one attention's values. made: the product, and values: its result by KV heads. joined: the
    attention's result in a row, and summed: the product that reads it."""

    made: fx.Node
    values: fx.Node
    attention: fx.Node
    joined: fx.Node
    summed: fx.Node
    modules: tuple[str, ...]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return int(self.values.meta["val"].shape[1])

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return int(self.attention.meta["val"].shape[1])

    @property
    def channels(self) -> int:
        """The number of channels of a KV head's values."""
        return int(self.values.meta["val"].shape[2])

    @property
    def weights(self) -> tuple[fx.Node, ...]:
        """The weights of both products, and the bias of the first if it has one."""
        own = (call_arguments(self.made)[name] for name in ("weight", "bias"))
        return *(weight for weight in own if weight is not None), call_arguments(self.summed)["weight"]


def value_paths(graph: ModelGraph) -> Iterator[ValuePath | Refusal]:
    """The path of each attention in the order of the graph, or why matrices cannot be folded into its weights."""
    for attention in graph.graph.find_nodes(op="call_function", target=_ATTENTION):
        try:
            yield _path(graph, attention)
        except Refused as refused:
            yield refused.refusal


def _path(graph: ModelGraph, attention: fx.Node) -> ValuePath:
    arguments = call_arguments(attention)
    if arguments["latent"]:
        raise Refused(f"{attention.name} attends to latents, which are keys too", attention)
    values: fx.Node = arguments["v"]
    maker = _maker(values, attention)
    joined = _only_reader(attention, _RESHAPE)
    summed = _only_reader(joined, _LINEAR)
    for node, user in ((values, attention), (maker, values)):
        others = [reader.name for reader in node.users if reader is not user]
        if others:
            raise Refused(f"{node.name} is also read by {', '.join(others)}", attention)
    path = ValuePath(maker, values, attention, joined, summed, ())
    if values.meta["val"].dim() != 3 or joined.meta["val"].dim() != 2 or call_arguments(summed)["x"] is not joined:
        raise Refused(f"{values.name} and {joined.name} are not rows of heads", attention)
    for weight in path.weights:
        if weight.name not in graph.weights:
            raise Refused(f"{weight.name} is computed in the step, not a dense weight", attention)
        if len(weight.users) > 1:
            raise Refused(f"{weight.name} is read by {len(weight.users)} nodes", attention)
    names = (stored_names(graph.weights[call_arguments(product)["weight"].name])[0] for product in (maker, summed))
    modules = tuple(name.removesuffix(".weight") for name in names)
    return ValuePath(maker, values, attention, joined, summed, modules)


def _maker(values: fx.Node, attention: fx.Node) -> fx.Node:
    if values.target is not _RESHAPE or values.all_input_nodes[0].target is not _LINEAR:
        raise Refused(f"the values {values.name} of {attention.name} are not those of one product", attention)
    return values.all_input_nodes[0]


def _only_reader(node: fx.Node, op: OpOverload) -> fx.Node:
    readers = list(node.users)
    if len(readers) != 1 or readers[0].target is not op:
        names = ", ".join(f"{reader.name} ({call_of(reader)})" for reader in readers)
        raise Refused(f"{node.name} is read by {names}, not by one {op} alone", node)
    return readers[0]
