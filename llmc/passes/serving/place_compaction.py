"""Place the ops that score, move or turn the rows of a cache where its table is cut (docs/cutting-tables.md).

    paged_attention(q, kc, vc, …)  ->  scores = score_keys(qc, qd, kc, compaction, scale, pool, softcap, longest)
                                       compact_kv(kc, vc, scores, compaction, head_dim, value_dim, sinks, recent)
                                       paged_attention(q, kc, vc, …)
                                       kv_write(halves of q's heads, qc, qd, slot_mapping_g)
for `snapkv`; every policy has a file in llmc/passes/compaction. A step with a `compaction` does what these ops say for
one request, and nothing else; in all other steps they do nothing. The first rewrite adds that input; each attention is
one more, or all are a second one if their layers choose rows together.
Must have: keys that are not part of latents; one rank and one stage; the further conditions of the policy's ops.
Numerics: exact, since steps without a compaction compute what they did before.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx

from llmc.errors import OptionError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.graph.step_inputs import add_step_input, step_input
from llmc.options import BuildOptions
from llmc.passes.compaction.compactor import compactor
from llmc.passes.compaction.placement import Layer, Placement
from llmc.passes.compaction.snapkv import snapkv
from llmc.passes.compaction.streaming import streaming
from llmc.passes.compaction.triattention import triattention
from llmc.passes.compaction.updated import h2o, kvzip, lru
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.program import COMPACTION, H2O, CachePolicy, Compactor, KVzip, Lru, Scored, SnapKV, Streaming, TriAttention

PLACEMENTS: Mapping[type[CachePolicy], Placement] = MappingProxyType(
    {
        Compactor: compactor,
        H2O: h2o,
        KVzip: kvzip,
        Lru: lru,
        SnapKV: snapkv,
        Streaming: streaming,
        TriAttention: triattention,
    }
)


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Place the ops before each attention of a group whose policy has some. Raises OptionError for layers that they
    cannot serve."""
    found = [(group, policy) for group, policy in enumerate(graph.policies, 1) if type(policy) in PLACEMENTS]
    if not found or step_input(graph, COMPACTION) is not None:
        return
    ((group, policy),) = found
    placement = PLACEMENTS[type(policy)]
    inputs = {node.meta.get("cache"): node for node in graph.inputs()}
    longest = options.max_model_len or graph.info.max_positions
    assert longest is not None, "an engine has a longest sequence"
    layers = [
        Layer(graph, spec, _reader(inputs[f"{spec.layer}.k"]), policy, longest, options.block_size)
        for spec in graph.caches
        if spec.group == group
    ]
    for layer in layers:
        _check(layer, placement)
    caches = [placement.add_caches(layer) for layer in layers]
    log.step(f"declare the compaction of {policy.shown}", *graph.inputs())
    add_step_input(graph, COMPACTION, ("K",), torch.int32)
    if placement.place_joined is not None and isinstance(policy, Scored) and policy.joins_layers:
        log.step("choose rows of the caches of all layers together", *(layer.node for layer in layers))
        placement.place_joined(layers)
        return
    for layer, own in zip(layers, caches, strict=True):
        log.step(f"choose rows of the cache of {layer.node.name}", layer.node)
        placement.place(layer, own)


place_compaction = GraphPass(
    "place_compaction", run, Numerics.EXACT, Stage.SERVING, unproved="it adds inputs, among them caches"
)


def _reader(keys: fx.Node) -> fx.Node:
    return next(user for user in keys.users if user.target is torch.ops.llmc.paged_attention.default)


def _check(layer: Layer, placement: Placement) -> None:
    graph = layer.graph
    if graph.ranks > 1 or graph.pipeline_stages > 1:
        problem: str | None = f"{graph.ranks} ranks and {graph.pipeline_stages} stages, and rows move on one of each"
    elif (format := layer.spec.format) is not None and format.keys != format.values:
        problem = f"keys and values in different formats, {format}, and kernels that choose rows read one"
    elif layer.given["latent"]:
        problem = "latents, whose keys are not rows of one cache"
    else:
        problem = placement.problem(layer)
    if problem is not None:
        raise OptionError(
            f"layer {layer.spec.layer} has {problem}",
            at=f"kv_compression={layer.policy.shown}",
            fix="build with kv_compression=stride:step=4,recent=512, or without",
        )
