"""Keep the KV cache in another dtype than the activations, for the option kv_dtype.

    kv_cache_i_k, kv_cache_i_v: float32[N, …]  ->  bfloat16[N, …]
Must have: paged caches. Writes round to the cache's dtype, attention reads it and computes in fp32 as before.
Numerics: lossy where the cache gets narrower: bf16 keys and values have 8 bits; apart from page_kv_cache for that.
"""

from dataclasses import replace

from llmc.graph.dtype_names import NAMED_DTYPES
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Change each layer's pair of caches; kv_dtype "auto" leaves them in the activations' dtype."""
    if options.kv_dtype == "auto":
        return
    dtype = NAMED_DTYPES[options.kv_dtype]
    inputs = {node.name: node for node in graph.inputs()}
    for spec in graph.caches:
        if spec.dtype is dtype:
            continue
        pair = [inputs[f"kv_cache_{spec.layer}_{part}"] for part in "kv"]
        log.step(f"{pair[0].name} + {pair[1].name} to {options.kv_dtype}", *pair)
        for node in pair:
            node.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape, dtype=dtype)
        graph.caches = tuple(replace(cache, dtype=dtype) if cache is spec else cache for cache in graph.caches)


cast_kv_cache = GraphPass("cast_kv_cache", run, Numerics.LOSSY, Stage.SERVING)
