"""Ops of `triattention`: score rows by the attention that later queries are expected to pay, and move the best rows.

Where heads of several layers choose together, all layers score their rows and join the scores before any row moves.
The means of a layer's queries are noted on them (calibrate_queries); the notes end here, because scores take the means.
"""

from collections.abc import Sequence

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.passes.compaction.placement import Layer, Placement
from llmc.passes.compaction.rotation import Rotation, rope_of, rotation_of
from llmc.program import ChoosingHeads, TriAttention

_llmc = torch.ops.llmc


def rotation_problem(queries: fx.Node, keys: fx.Node) -> str | None:
    """Return why keys do not say how far later queries are, or None; it follows "layer N has".

    Must have: queries and keys that llmc::rope rotates alike, with frequencies that are known at build.
    """
    found = rotation_of(keys)
    if isinstance(found, str):
        return found
    if found.inv_freq is None:
        return "keys that positions do not rotate, so they do not say how far later queries are"
    of_queries = rotation_of(queries, "queries")
    if isinstance(of_queries, str):
        return of_queries
    return None if of_queries == found else "queries and keys that are rotated differently"


def _problem(layer: Layer) -> str | None:
    queries = layer.given["q"]
    problem = rotation_problem(queries, layer.keys)
    if problem is None and _note(queries) is None:
        return "queries without means: only a build measures them, in the pass calibrate_queries"
    return problem or _heads_problem(layer)


def _heads_problem(layer: Layer) -> str | None:
    """Return why the layer's KV heads have none in another layer to choose rows with, or None."""
    policy, own = layer.policy, layer.spec
    assert isinstance(policy, TriAttention)
    group = (spec for spec in layer.graph.caches if spec.group == own.group)
    other = next((spec for spec in group if spec.kv_heads != own.kv_heads), None)
    if policy.heads != ChoosingHeads.KV_HEAD or other is None:
        return None
    numbers = f"({own.kv_heads}) than layer {other.layer} ({other.kv_heads})"
    return f"another number of KV heads {numbers}, and heads=kv_head joins those of one index"


def _note(queries: fx.Node) -> fx.Node | None:
    noted: fx.Node = call_arguments(rope_of(queries))["x"]
    return noted if noted.target is _llmc.query_means.default else None


def _place(layer: Layer, caches: tuple[fx.Node, ...]) -> None:
    with layer.graph.graph.inserting_before(layer.write):
        _move(layer, _score(layer))


def _place_joined(layers: Sequence[Layer]) -> None:
    """Add the ops in front of the first write, so that no row moves before all layers have scored theirs."""
    graph, writes = layers[0].graph.graph, {layer.write for layer in layers}
    *others, last = layers
    before: fx.Node | None = None
    with graph.inserting_before(next(node for node in graph.nodes if node in writes)):
        for layer in others:
            before = _join(layer, _score(layer), before, 1 if _across_heads(layer) else layer.spec.kv_heads)
        scores = _score(last)
        sizes = dict.fromkeys(layer.spec.kv_heads for layer in layers)
        joined = {kv_heads: _join(last, scores, before, kv_heads) for kv_heads in sizes}
        for layer in layers:
            _move(layer, joined[layer.spec.kv_heads])


def _score(layer: Layer) -> fx.Node:
    policy, given, rotation = layer.policy, layer.given, rotation_of(layer.keys)
    assert isinstance(policy, TriAttention) and isinstance(rotation, Rotation)
    note, graph = _note(given["q"]), layer.graph.graph
    assert note is not None
    noted = call_arguments(note)
    note.replace_all_uses_with(noted["x"])
    graph.erase_node(note)
    turned = (rotation.inv_freq, rotation.interleaved, rotation.is_spread)
    read = (given["k_cache"], layer.compaction, noted["means"], *turned, policy.sinks, policy.recent, layer.longest)
    return graph.call_function(_llmc.score_expected.default, (*read, given["cache_format"]))


def _join(layer: Layer, scores: fx.Node, before: fx.Node | None, kv_heads: int) -> fx.Node:
    joined = (scores, before, layer.compaction, layer.longest, kv_heads, _across_heads(layer))
    return layer.graph.graph.call_function(_llmc.join_scores.default, joined)


def _across_heads(layer: Layer) -> bool:
    assert isinstance(layer.policy, TriAttention)
    return layer.policy.heads == ChoosingHeads.ALL


def _move(layer: Layer, scores: fx.Node) -> None:
    policy, given, spec = layer.policy, layer.given, layer.spec
    assert isinstance(policy, TriAttention)
    moved = (given["k_cache"], given["v_cache"], scores, layer.compaction, spec.head_dim, spec.value_dim)
    stays = (policy.sinks, policy.recent, given["cache_format"])
    layer.graph.graph.call_function(_llmc.compact_kv.default, (*moved, *stays))


triattention = Placement(_problem, _place, place_joined=_place_joined)
