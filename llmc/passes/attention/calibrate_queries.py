"""Measure the queries of attentions on calibration text, for KV compression that expects later ones.

    attention(rope(q, …), rope(k, …), v, …)  ->  attention(rope(query_means(q, means), …), rope(k, …), v, …)
means [heads, channels + rotary / 2] has the mean query of each head before its rotation, and how much the mean absolute
value of each pair exceeds that of the mean pair. It is a constant. One run over the text measures it, after the norms
of queries and with the weights' codes. One rewrite for each attention that compress_kv_cache will change.
place_compaction hands the means to llmc::score_expected.
Must have: queries and keys that llmc::rope rotates alike, with frequencies that are known at build; one rank and stage.
Numerics: exact, since query_means returns its queries.
"""

import torch
from torch import Tensor, fx

from llmc.errors import OptionError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant
from llmc.ops.score_expected import means_of, pairs
from llmc.options import BuildOptions
from llmc.passes.attention.compress_kv_cache import asked_policy, check_scores, refuse_compression
from llmc.passes.compaction.rotation import Rotation, rotation_of
from llmc.passes.compaction.triattention import rotation_problem
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.calibration import calibration_sequences
from llmc.passes.quantization.stream import Stream
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog
from llmc.program import Compression

_llmc = torch.ops.llmc


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Measure every attention on one run over the text. Raises OptionError for rotations that scores do not know."""
    policy = asked_policy(options)
    if not (isinstance(policy, Compression) and policy.NEEDS_TEXT):
        return
    # The other passes of the policy raise for drafts, ranks and stages.
    if graph.draft is not None or graph.ranks > 1 or graph.pipeline_stages > 1:
        return
    ropes = dict[fx.Node, Rotation]()
    for layer, node in enumerate(graph.graph.find_nodes(op="call_function", target=_llmc.attention.default)):
        if refuse_compression(node, policy) is not None:
            continue
        check_scores(graph, node, policy)
        queries, keys = (call_arguments(node)[name] for name in "qk")
        rotation = rotation_of(queries)
        problem = rotation_problem(queries, keys)
        if problem is not None:
            raise OptionError(
                f"layer {layer} has {problem}",
                at=f"kv_compression={policy.shown}",
                fix="build with another policy, such as snapkv or h2o (docs/kv-compression.md), or without",
            )
        assert isinstance(rotation, Rotation)
        if call_arguments(queries)["x"].target is not _llmc.query_means.default:
            ropes[queries] = rotation
    if not ropes:
        return
    stream = Stream(graph, data.source, calibration_sequences(graph, options, data))
    measured = {
        rope: _measured(stream, rope, ropes[rope])
        for rope in data.told("measure queries", stream.stops(list(ropes)), len(ropes))
    }
    for index, (rope, means) in enumerate(measured.items()):
        log.step(f"note the means of the queries of {rope.name}", rope)
        like = graph.inputs()[0].meta["val"].new_empty(means.shape, dtype=means.dtype)
        weight = new_weight(graph, f"query_means_{index}", Constant(means), like)
        with graph.graph.inserting_before(rope):
            noted = graph.graph.call_function(_llmc.query_means.default, (call_arguments(rope)["x"], weight))
        rope.update_arg(0, noted)


calibrate_queries = WeightPass(
    "calibrate_queries", run, Numerics.EXACT, Stage.CANONICAL, unproved="it measures a model on text"
)


def _measured(stream: Stream, rope: fx.Node, rotation: Rotation) -> Tensor:
    """The means of the queries that a rope is about to rotate."""
    assert rotation.inv_freq is not None
    half, queries = int(rotation.inv_freq.meta["val"].shape[0]), call_arguments(rope)["x"]
    heads, channels = queries.meta["val"].shape[1:]
    total, sizes = (torch.zeros(heads, n, dtype=torch.float64) for n in (channels, half))
    count = 0
    for part in stream.parts(queries):
        total += part.double().sum(0)
        sizes += torch.hypot(*pairs(part.double(), half, rotation.interleaved)).sum(0)
        count += len(part)
    return means_of(total, sizes, count, rotation.scale, rotation.interleaved)
