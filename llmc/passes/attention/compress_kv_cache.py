"""Drop rows from the caches of layers that keep everything, for the option `kv_compression`.

    attention(q, k, v, …)  ->  attention(q, k, v, …, keeps="stride:step=4,recent=512")
One rewrite for each attention. Requests may ask for another policy later, up to one that keeps everything.
Must have: no window, chunk, or choice of keys, which say themselves what a query sees; no scores by distance (ALiBi,
biases); nothing else that keeps rows of its own by position, such as a draft's layers. One layer at least has to
qualify. Where `kv_cache` also keeps the newest rows exact, no cut may drop them.
Numerics: lossy.
"""

import torch
from torch import fx

from llmc.errors import OptionError
from llmc.formats.cache_format import exact_rows
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.program import EVERYTHING, CachePolicy, check_cuts, check_newest, fitted_compression


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Change every attention that keeps everything. Raises OptionError if there is none."""
    policy = asked_policy(options)
    if policy == EVERYTHING:
        return
    if graph.draft is not None:
        raise OptionError(
            f"the engine drafts with its own layers, whose caches keep every position, and {policy.shown} drops rows",
            at=f"kv_compression={policy.shown}",
            fix="build without speculative, or without kv_compression; drafts by ngram or lookahead work with it",
        )
    rows = exact_rows(options.kv_cache, options.max_model_len or graph.info.max_positions)
    if rows is not None:
        check_newest(policy, rows, options.block_size)
    attentions = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
    has_fitting = False
    for node in attentions:
        refusal = refuse_compression(node, policy)
        if refusal is not None:
            log.refuse(refusal)
            continue
        check_scores(graph, node, policy)
        has_fitting = True
        if call_arguments(node)["keeps"] is None:
            log.step(f"let the cache of {node.name} keep {policy.shown}", node)
            node.update_kwarg("keeps", str(policy))
    if not has_fitting:
        raise OptionError(
            f"no layer of {graph.info.name} has a cache that keeps everything, so {policy.shown} cannot drop rows",
            at=f"kv_compression={policy.shown}",
            fix="build without kv_compression",
        )


compress_kv_cache = GraphPass("compress_kv_cache", run, Numerics.LOSSY, Stage.CANONICAL)


def asked_policy(options: BuildOptions) -> CachePolicy:
    """The policy of `kv_compression`. Raises OptionError for an unknown policy, or for one that does not fit blocks."""
    policy = fitted_compression(options.kv_compression, options.block_size)
    check_cuts(policy, options.block_size)
    return policy


def distance_argument(node: fx.Node) -> str | None:
    """The argument of an attention that counts how far back a key is, or None."""
    return next((name for name in ("slopes", "bias") if call_arguments(node)[name] is not None), None)


def check_scores(graph: ModelGraph, node: fx.Node, policy: CachePolicy) -> None:
    """Raise OptionError for an attention whose scores count how far back a key is: rows do not tell after a cut."""
    distance = distance_argument(node)
    if distance is not None:
        raise OptionError(
            f"{graph.info.name} adds {distance} to scores, which count how far back a key is, and {policy.shown} drops "
            "rows",
            at=f"kv_compression={policy.shown}",
            fix="build without kv_compression",
        )


def refuse_compression(node: fx.Node, policy: CachePolicy) -> Refusal | None:
    """Return why the cache of an attention does not get the policy, or None."""
    arguments = call_arguments(node)
    if arguments["keeps"] not in (None, str(policy)):
        return Refusal(f"its cache keeps {arguments['keeps']} already", node)
    name = next((name for name in ("window", "chunk", "chosen") if arguments[name] is not None), None)
    return None if name is None else Refusal(f"its {name} limits what a query sees", node)
