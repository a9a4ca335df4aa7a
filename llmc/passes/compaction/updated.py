"""Ops of `h2o`, `lru` and `kvzip`: keep the queries of each token, update the scores of rows, and move the best rows.

The scores are in a cache of the policy's own group, so that they move, are copied and leave with their rows.
"""

from functools import partial

import torch
from torch import fx
from torch._ops import OpOverload

from llmc.graph.model_graph import CacheSpec
from llmc.graph.step_inputs import add_step_input
from llmc.passes.compaction.placement import Layer, Placement
from llmc.passes.compaction.snapkv import keep_queries, queries_problem
from llmc.program import Scored, group_input

_llmc = torch.ops.llmc


def keep_numbers(layer: Layer) -> tuple[fx.Node, fx.Node]:
    """A pair of caches with a number for each row and KV head of the layer's cache, which move with the rows."""
    graph, heads = layer.graph, layer.spec.kv_heads
    spec = CacheSpec(len(graph.caches), heads, 1, 1, torch.float32, group=layer.spec.group)
    blocks = group_input("N", spec.group)
    first, second = (
        add_step_input(graph, f"kv_cache_{spec.layer}_{part}", (blocks, heads, layer.block_size, 1), torch.float32)
        for part in "kv"
    )
    first.meta["cache"], second.meta["cache"] = f"{spec.layer}.k", f"{spec.layer}.v"
    graph.caches = (*graph.caches, spec)
    return first, second


def _reading_problem(layer: Layer) -> str | None:
    if layer.graph.states:
        return "a model with states, which a second reading of the prompt would change"
    return queries_problem(layer)


def _add_caches(layer: Layer) -> tuple[fx.Node, ...]:
    return *keep_queries(layer), keep_numbers(layer)[0]


def _place(layer: Layer, caches: tuple[fx.Node, ...], update: OpOverload) -> None:
    policy, given, spec, graph = layer.policy, layer.given, layer.spec, layer.graph.graph
    assert isinstance(policy, Scored)
    *queries, sums = caches
    keys, values, format, compaction = given["k_cache"], given["v_cache"], given["cache_format"], layer.compaction
    with graph.inserting_before(layer.write):
        read = (keys, sums, compaction, given["scale"], given["softcap"], layer.longest, format)
        scores = graph.call_function(update, (*queries, *read))
        stays = (policy.sinks, policy.recent)
        moved = (keys, values, scores, compaction, spec.head_dim, spec.value_dim, *stays, format)
        graph.call_function(_llmc.compact_kv.default, moved)
        graph.call_function(_llmc.keep_sums.default, (sums, scores, compaction, *stays))


h2o = Placement(queries_problem, partial(_place, update=_llmc.sum_attention.default), _add_caches)
lru = Placement(queries_problem, partial(_place, update=_llmc.last_uses.default), _add_caches)
kvzip = Placement(_reading_problem, partial(_place, update=_llmc.peak_attention.default), _add_caches)
