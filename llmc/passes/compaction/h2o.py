"""Ops of `h2o`: keep the queries of each token, add their attention to the sums of rows, and move the best rows.

The sums lie in a cache of the policy's own group, so that they move, part and leave with their rows.
"""

import torch
from torch import fx

from llmc.graph.model_graph import CacheSpec
from llmc.graph.step_inputs import add_step_input
from llmc.passes.compaction.placement import Layer, Placement
from llmc.passes.compaction.snapkv import keep_queries, queries_problem
from llmc.program import H2O, group_input

_llmc = torch.ops.llmc


def _add_caches(layer: Layer) -> tuple[fx.Node, ...]:
    queries, graph, heads = keep_queries(layer), layer.graph, layer.spec.kv_heads
    spec = CacheSpec(len(graph.caches), heads, 1, 1, torch.float32, group=layer.spec.group)
    blocks = group_input("N", spec.group)
    sums, other = (
        add_step_input(graph, f"kv_cache_{spec.layer}_{part}", (blocks, heads, layer.block_size, 1), torch.float32)
        for part in "kv"
    )
    sums.meta["cache"], other.meta["cache"] = f"{spec.layer}.k", f"{spec.layer}.v"
    graph.caches = (*graph.caches, spec)
    return *queries, sums


def _place(layer: Layer, caches: tuple[fx.Node, ...]) -> None:
    policy, given, spec, graph = layer.policy, layer.given, layer.spec, layer.graph.graph
    assert isinstance(policy, H2O)
    *queries, sums = caches
    keys, values, format, compaction = given["k_cache"], given["v_cache"], given["cache_format"], layer.compaction
    with graph.inserting_before(layer.write):
        summed = (keys, sums, compaction, given["scale"], given["softcap"], layer.longest, format)
        scores = graph.call_function(_llmc.sum_attention.default, (*queries, *summed))
        stays = (policy.sinks, policy.recent)
        moved = (keys, values, scores, compaction, spec.head_dim, spec.value_dim, *stays, format)
        graph.call_function(_llmc.compact_kv.default, moved)
        graph.call_function(_llmc.keep_sums.default, (sums, scores, compaction, *stays))


h2o = Placement(queries_problem, _place, _add_caches)
