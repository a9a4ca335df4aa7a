"""Ops of `triattention`: score rows by the attention that later queries are expected to pay, and move the best rows.

The means of a layer's queries are noted on them (calibrate_queries); the notes end here, because scores take the means.
"""

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.passes.compaction.placement import Layer, Placement
from llmc.passes.compaction.rotation import Rotation, rope_of, rotation_of
from llmc.program import TriAttention

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
    return problem


def _note(queries: fx.Node) -> fx.Node | None:
    noted: fx.Node = call_arguments(rope_of(queries))["x"]
    return noted if noted.target is _llmc.query_means.default else None


def _place(layer: Layer, caches: tuple[fx.Node, ...]) -> None:
    policy, given, spec, rotation = layer.policy, layer.given, layer.spec, rotation_of(layer.keys)
    assert isinstance(policy, TriAttention) and isinstance(rotation, Rotation)
    note = _note(given["q"])
    assert note is not None
    noted = call_arguments(note)
    note.replace_all_uses_with(noted["x"])
    keys, values, format = given["k_cache"], given["v_cache"], given["cache_format"]
    turned, stays = (rotation.inv_freq, rotation.interleaved, rotation.is_spread), (policy.sinks, policy.recent)
    graph = layer.graph.graph
    with graph.inserting_before(layer.write):
        read = (keys, layer.compaction, noted["means"], *turned, *stays, layer.longest, format)
        scores = graph.call_function(_llmc.score_expected.default, read)
        moved = (keys, values, scores, layer.compaction, spec.head_dim, spec.value_dim, *stays, format)
        graph.call_function(_llmc.compact_kv.default, moved)
    graph.erase_node(note)


triattention = Placement(_problem, _place)
