"""Ops of `compactor`: score a chunk's rows by its queries where it ends, and move the rows that stand out at cuts.

The attention that rows got in their chunks, and their positions, are in a cache of the policy's own group.
"""

import operator

import torch
from torch import fx

from llmc.ops.score_leverage import gaussian_sketch
from llmc.passes.compaction.placement import Layer, Placement
from llmc.passes.compaction.rotation import Rotation, rotation_of
from llmc.passes.compaction.snapkv import keep_queries, queries_problem
from llmc.passes.compaction.updated import keep_numbers
from llmc.passes.recorded_graph import constant_weight
from llmc.program import Compactor

_llmc = torch.ops.llmc


def _problem(layer: Layer) -> str | None:
    rotation = rotation_of(layer.keys)
    return rotation if isinstance(rotation, str) else queries_problem(layer)


def _add_caches(layer: Layer) -> tuple[fx.Node, ...]:
    return *keep_queries(layer), *keep_numbers(layer)


def _place(layer: Layer, caches: tuple[fx.Node, ...]) -> None:
    policy, given, spec, graph = layer.policy, layer.given, layer.spec, layer.graph.graph
    rotation = rotation_of(layer.keys)
    assert isinstance(policy, Compactor) and isinstance(rotation, Rotation)
    *queries, attention, positions = caches
    pair, format, compaction = (given["k_cache"], given["v_cache"]), given["cache_format"], layer.compaction
    sketch = constant_weight(layer.graph, f"sketch_{spec.head_dim}", gaussian_sketch(spec.head_dim))
    turned = (rotation.inv_freq, rotation.interleaved, rotation.is_spread)
    stays = (policy.sinks, policy.recent)
    with graph.inserting_before(layer.write):
        read = (*queries, *pair, attention, positions, compaction, sketch, *turned, given["scale"], given["softcap"])
        found = graph.call_function(
            _llmc.score_leverage.default, (*read, *stays, spec.value_dim, layer.longest, format)
        )
        scores, new_attention, new_positions = (graph.call_function(operator.getitem, (found, i)) for i in range(3))
        moved = (*pair, scores, compaction, spec.head_dim, spec.value_dim, *stays, format)
        graph.call_function(_llmc.compact_kv.default, moved)
        for cache, numbers in ((attention, new_attention), (positions, new_positions)):
            graph.call_function(_llmc.keep_sums.default, (cache, scores, compaction, *stays, numbers))


compactor = Placement(_problem, _place, _add_caches)
