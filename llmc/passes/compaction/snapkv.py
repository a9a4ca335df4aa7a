"""Ops of `snapkv`: keep the queries of each token, score rows by the last ones, and move the best rows.

The last queries of each request are in the caches of a separate group, whose window is that of the policy.
"""

import torch
from torch import fx

from llmc.graph.model_graph import CacheSpec
from llmc.graph.step_inputs import add_step_input, step_input
from llmc.passes.compaction.placement import Layer, Placement
from llmc.program import SnapKV, group_input

_llmc, _aten = torch.ops.llmc, torch.ops.aten


def queries_problem(layer: Layer) -> str | None:
    """Return why the layer's queries cannot be kept in halves of heads, or None."""
    channels = layer.given["q"].meta["val"].shape[2]
    return f"heads of {channels} channels, and queries are kept in halves" if channels % 2 else None


def keep_queries(layer: Layer) -> tuple[fx.Node, ...]:
    """Caches for the layer's queries (see score_keys for their halves), which each step writes."""
    graph, queries, q = layer.graph, layer.policy.queries, layer.given["q"]
    assert queries is not None
    heads, channels = (int(size) for size in q.meta["val"].shape[1:])
    group = 1 + graph.policies.index(queries)
    dtype, blocks = graph.info.dtype, group_input("N", group)
    spec = CacheSpec(len(graph.caches), heads, channels // 2, channels // 2, dtype, group=group)
    first, second = (
        add_step_input(graph, f"kv_cache_{spec.layer}_{part}", (blocks, heads, layer.block_size, channels // 2), dtype)
        for part in "kv"
    )
    first.meta["cache"], second.meta["cache"] = f"{spec.layer}.k", f"{spec.layer}.v"
    graph.caches = (*graph.caches, spec)
    call, slots = graph.graph.call_function, step_input(graph, group_input("slot_mapping", group))
    with graph.graph.inserting_after(layer.node):
        halves = call(_aten.reshape.default, (q, [-1, 2 * heads, channels // 2]))
    with graph.graph.inserting_after(halves):
        low = call(_aten.slice.Tensor, (halves, 1, 0, heads))
    with graph.graph.inserting_after(low):
        high = call(_aten.slice.Tensor, (halves, 1, heads, 2 * heads))
    with graph.graph.inserting_after(high):
        call(_llmc.kv_write.default, (low, high, first, second, slots))
    return first, second


def _place(layer: Layer, queries: tuple[fx.Node, ...]) -> None:
    policy, given, spec, graph = layer.policy, layer.given, layer.spec, layer.graph.graph
    assert isinstance(policy, SnapKV)
    keys, values, format = given["k_cache"], given["v_cache"], given["cache_format"]
    with graph.inserting_before(layer.write):
        scored = (keys, layer.compaction, given["scale"], policy.pool, given["softcap"], layer.longest, format)
        scores = graph.call_function(_llmc.score_keys.default, (*queries, *scored))
        moved = (spec.head_dim, spec.value_dim, policy.sinks, policy.recent, format)
        graph.call_function(_llmc.compact_kv.default, (keys, values, scores, layer.compaction, *moved))


snapkv = Placement(queries_problem, _place, keep_queries)
