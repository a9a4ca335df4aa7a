"""One weight made of several, stacked along their first axis: the recipe changes, no data is touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.propagate import fake_mode
from llmc.graph.refusal import Refusal
from llmc.graph.weights import Derived


def stack_rows(graph: ModelGraph, weights: Sequence[fx.Node]) -> fx.Node:
    """A new weight placeholder, the rows of each of `weights` in order; all of one dtype and width."""
    value = _stacked_value(graph, weights)
    with graph.graph.inserting_after(graph.graph.find_nodes(op="placeholder")[-1]):
        node = graph.graph.placeholder(_joined_name([w.name for w in weights]))
    node.meta["val"] = value
    node.meta["stack_trace"] = weights[0].meta.get("stack_trace")
    graph.weights[node.name] = Derived(torch.ops.aten.cat.default, (tuple(graph.weights[w.name] for w in weights), 0))
    return node


def cannot_stack(graph: ModelGraph, owners: Sequence[tuple[fx.Node, fx.Node]]) -> Refusal | None:
    """Why the weights of some ops cannot become one. owners: (weight, the op that reads it)."""
    first = owners[0][0].meta["val"]
    for weight, op in owners:
        if weight.name not in graph.weights:
            return Refusal(f"{weight.name} is computed in the step, not a weight", op)
        others = [u.name for u in weight.users if u is not op]
        if others:
            return Refusal(f"weight {weight.name} is also used by {', '.join(others)}", op)
        if weight.meta["val"].dtype is not first.dtype:
            return Refusal(f"weight {weight.name} is {weight.meta['val'].dtype}, {owners[0][0].name} {first.dtype}", op)
    return None


def _stacked_value(graph: ModelGraph, weights: Sequence[fx.Node]) -> torch.Tensor:
    with fake_mode(graph.graph):
        return torch.cat([w.meta["val"] for w in weights])


def _joined_name(names: Sequence[str]) -> str:
    """attn_q_weight, attn_k_weight -> attn_q_k_weight: what differs, between what is the same at both ends."""
    words = [name.split("_") for name in names]
    start = _same(words)
    end = _same([w[start:][::-1] for w in words])
    middle = [word for w in words for word in w[start : len(w) - end]]
    return "_".join([*words[0][:start], *middle, *words[0][len(words[0]) - end :]])


def _same(words: Sequence[Sequence[str]]) -> int:
    """How many words all of them start with."""
    return next((i for i, at in enumerate(zip(*words, strict=False)) if len(set(at)) > 1), min(map(len, words)))
