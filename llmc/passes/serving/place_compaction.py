"""Score and move the rows of caches whose policy keeps those with the highest scores (docs/kv-compression.md).

    paged_attention(q, kc, vc, …)  ->  scores = score_keys(qc, qd, kc, compaction, scale, pool, softcap, longest)
                                       compact_kv(kc, vc, scores, compaction, head_dim, value_dim, sinks, recent)
                                       paged_attention(q, kc, vc, …)
                                       kv_write(halves of q's heads, qc, qd, slot_mapping_g)
The last queries of each request lie in caches of a group of their own, whose window is that of the policy. A step with
a `compaction` does what the new ops say for one request, and nothing else; in all other steps they do nothing. The
first rewrite adds that input; each attention is one more.
Must have: an even number of channels in a head; keys that are no part of latents; one rank and one stage.
Numerics: exact, since steps without a compaction compute what they did before.
"""

import torch
from torch import fx

from llmc.errors import OptionError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import CacheSpec, ModelGraph
from llmc.graph.stage import Stage
from llmc.graph.step_inputs import add_step_input, step_input
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.program import COMPACTION, SnapKV, group_input

_llmc, _aten = torch.ops.llmc, torch.ops.aten


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Place the ops before each attention of a group whose policy scores rows. Raises OptionError for layers that they
    cannot serve."""
    found = [(group, policy) for group, policy in enumerate(graph.policies, 1) if isinstance(policy, SnapKV)]
    if not found or step_input(graph, COMPACTION) is not None:
        return
    ((group, policy),) = found
    inputs = {node.meta.get("cache"): node for node in graph.inputs()}
    layers = [(spec, inputs[f"{spec.layer}.k"]) for spec in graph.caches if spec.group == group]
    attentions = [(spec, _reader(keys)) for spec, keys in layers]
    for spec, node in attentions:
        _check(graph, spec, node, policy)
    caches = [_add_query_caches(graph, node, policy, options.block_size) for _, node in attentions]
    log.step(f"declare the compaction of {policy}", *graph.inputs())
    add_step_input(graph, COMPACTION, ("K",), torch.int32)
    longest = options.max_model_len or graph.info.max_positions
    assert longest is not None, "an engine has a longest sequence"
    for (spec, node), pair in zip(attentions, caches, strict=True):
        log.step(f"choose rows of the cache of {node.name}", node)
        _place(graph, spec, node, policy, pair, longest)


place_compaction = GraphPass(
    "place_compaction", run, Numerics.EXACT, Stage.SERVING, unproved="it adds inputs, among them caches"
)


def _reader(keys: fx.Node) -> fx.Node:
    return next(user for user in keys.users if user.target is _llmc.paged_attention.default)


def _check(graph: ModelGraph, spec: CacheSpec, node: fx.Node, policy: SnapKV) -> None:
    given = call_arguments(node)
    problem = None
    if graph.ranks > 1 or graph.pipeline_stages > 1:
        problem = f"{graph.ranks} ranks and {graph.pipeline_stages} stages, and rows are chosen on one of each"
    elif given["latent"]:
        problem = "latents, whose keys are no rows of one cache"
    elif given["q"].meta["val"].shape[2] % 2:
        problem = f"heads of {given['q'].meta['val'].shape[2]} channels, and queries are kept in halves"
    if problem is not None:
        raise OptionError(
            f"layer {spec.layer} has {problem}",
            at=f"kv_compression={policy}",
            fix="build with kv_compression=stride:step=4,recent=512, or without",
        )


def _add_query_caches(graph: ModelGraph, node: fx.Node, policy: SnapKV, block_size: int) -> tuple[fx.Node, fx.Node]:
    """Caches for the layer's queries; see score_keys for their halves."""
    heads, channels = (int(size) for size in call_arguments(node)["q"].meta["val"].shape[1:])
    group = 1 + graph.policies.index(policy.queries)
    dtype = graph.info.dtype
    spec = CacheSpec(len(graph.caches), heads, channels // 2, channels // 2, dtype, group=group)
    blocks = group_input("N", group)
    first, second = (
        add_step_input(graph, f"kv_cache_{spec.layer}_{part}", (blocks, heads, block_size, channels // 2), dtype)
        for part in "kv"
    )
    first.meta["cache"], second.meta["cache"] = f"{spec.layer}.k", f"{spec.layer}.v"
    graph.caches = (*graph.caches, spec)
    return first, second


def _place(
    graph: ModelGraph, spec: CacheSpec, node: fx.Node, policy: SnapKV, queries: tuple[fx.Node, fx.Node], longest: int
) -> None:
    given, call = call_arguments(node), graph.graph.call_function
    compaction = step_input(graph, COMPACTION)
    keys, values, q = given["k_cache"], given["v_cache"], given["q"]
    heads, channels = (int(size) for size in q.meta["val"].shape[1:])
    slots = step_input(graph, group_input("slot_mapping", 1 + graph.policies.index(policy.queries)))
    write = next(user for user in keys.users if user.target is _llmc.kv_write.default)
    with graph.graph.inserting_before(write):
        scored = (
            *queries,
            keys,
            compaction,
            given["scale"],
            policy.pool,
            given["softcap"],
            longest,
            given["cache_format"],
        )
        scores = call(_llmc.score_keys.default, scored)
        moved = (keys, values, scores, compaction, spec.head_dim, spec.value_dim, policy.sinks, policy.recent)
        call(_llmc.compact_kv.default, (*moved, given["cache_format"]))
    with graph.graph.inserting_after(node):
        halves = call(_aten.reshape.default, (q, [-1, 2 * heads, channels // 2]))
    with graph.graph.inserting_after(halves):
        first = call(_aten.slice.Tensor, (halves, 1, 0, heads))
    with graph.graph.inserting_after(first):
        second = call(_aten.slice.Tensor, (halves, 1, heads, 2 * heads))
    with graph.graph.inserting_after(second):
        call(_llmc.kv_write.default, (first, second, *queries, slots))
