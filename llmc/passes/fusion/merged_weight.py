"""One weight made of several, stacked along their first axis: the recipe changes, no data is touched.

A weight that is not dense is stacked by its stored tensors, such as codes, scales and zeros, whose rows are
independent.
"""

from collections.abc import Sequence

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.fake_value import fake_mode
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import Part
from llmc.graph.product_parts import part_of, stored_rows
from llmc.graph.refusal import Refused
from llmc.graph.render import op_name
from llmc.graph.weights import Derived
from llmc.passes.recorded_graph import new_weight
from llmc.passes.uses import used_only_by


def stack_rows(graph: ModelGraph, weights: Sequence[fx.Node]) -> fx.Node:
    """A new weight, the rows of each of `weights` in order, all of one dtype and width: a placeholder, or what yields
    it where the weights are stored otherwise."""
    if part_of(weights[0]) is not Part.STORAGE:
        return _stacked(graph, weights)
    rows = [stored_rows(weight) for weight in weights]
    stacked = {name: _stacked(graph, [row[name] for row in rows]) for name in rows[0]}
    arguments = call_arguments(weights[0]) | stacked
    with graph.graph.inserting_before(min(weights)):
        return graph.graph.create_node("call_function", weights[0].target, tuple(arguments.values()))


def _stacked(graph: ModelGraph, weights: Sequence[fx.Node]) -> fx.Node:
    recipe = Derived(torch.ops.aten.cat.default, (tuple(graph.weights[w.name] for w in weights), 0))
    with fake_mode(graph.graph):
        value = torch.cat([w.meta["val"] for w in weights])
    node = new_weight(graph, _joined_name([w.name for w in weights]), recipe, value)
    node.meta["stack_trace"] = weights[0].meta.get("stack_trace")
    return node


def check_stackable(graph: ModelGraph, owners: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Raise Refused if the weights of some ops cannot become one. owners: (weight, the op that reads it)."""
    (first, _), *_ = owners
    dtype = first.meta["val"].dtype
    for weight, op in owners:
        kind, wanted = _how_stored(weight), _how_stored(first)
        if kind != wanted:
            raise Refused(f"weight {weight.name} is {kind}, {first.name} {wanted}", op)
        if part_of(weight) is not Part.STORAGE and weight.name not in graph.weights:
            raise Refused(f"{weight.name} is computed in the step, not a weight", op)
        used_only_by(weight, (op,), at=op)
        if weight.meta["val"].dtype is not dtype:
            raise Refused(f"weight {weight.name} is {weight.meta['val'].dtype}, {first.name} {dtype}", op)


def _how_stored(weight: fx.Node) -> str:
    """The key that weights must share to be stacked; their numbers of rows may differ."""
    if part_of(weight) is not Part.STORAGE:
        return "dense"
    rows = {name: node.meta["val"] for name, node in stored_rows(weight).items()}
    shown = {name: f"{list(value.shape[1:])} {value.dtype}" for name, value in rows.items()}
    arguments = call_arguments(weight) | shown
    return f"{op_name(weight.target)}({', '.join(f'{name}: {value}' for name, value in arguments.items())})"


def _joined_name(names: Sequence[str]) -> str:
    """attn_q_weight, attn_k_weight -> attn_q_k_weight: what differs, between what is the same at both ends."""
    words = [name.split("_") for name in names]
    start = _same(words)
    end = _same([w[start:][::-1] for w in words])
    middle = [word for w in words for word in w[start : len(w) - end]]
    return "_".join([*words[0][:start], *middle, *words[0][len(words[0]) - end :]])


def _same(words: Sequence[Sequence[str]]) -> int:
    """Return the number of words with which all names start."""
    return next((i for i, at in enumerate(zip(*words, strict=False)) if len(set(at)) > 1), min(map(len, words)))
