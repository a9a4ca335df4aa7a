"""Rotate queries and keys and write the cache in one pass, so that rotated keys are never stored twice.

    q' = rope(q, cos, sin, i); k' = rope(k, cos, sin, i); kv_write(k', v, kc, vc, slots); paged_attention(q', kc, …)
        ->  q' = rope_kv_write(q, k, v, cos, sin, kc, vc, slots, i); paged_attention(q', kc, …)
Partial and interleaved rotations are the same op. Must have: nothing before that attention reads q', and
only the write reads k'; both turn by the same angles in the same order of channels, and q, k and v have one dtype.
Numerics: exact, unless the cache is wider than k: then the rotated keys are rounded to k's dtype as before too.
"""

from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refused
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.uses import used_only_by

_ROPE = torch.ops.llmc.rope.default
_WRITE = torch.ops.llmc.kv_write.default
_ATTENTION = torch.ops.llmc.paged_attention.default
_FUSED = torch.ops.llmc.rope_kv_write.default


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Try every write of rotated keys, in order. A layer without rotation is not a candidate."""
    for write in graph.graph.find_nodes(op="call_function", target=_WRITE):
        k = call_arguments(write)["k"]
        if k.target is not _ROPE:
            continue
        with log.refusing():
            q, attention = _find(write, k)
            log.step(f"{q.name} + {k.name} + {write.name}", q, k, write)
            _fuse(graph, q, k, write, attention)


def _layer(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, slots: Any, interleaved: bool, **step: Any
) -> Any:
    _WRITE(_ROPE(k, cos, sin, interleaved), v, k_cache, v_cache, slots)
    return _ATTENTION(_ROPE(q, cos, sin, interleaved), k_cache, v_cache, *step.values(), 0.5)


def _example(interleaved: bool) -> Example:
    tensors = {"q": ("T", 2, 4), "k": ("T", 1, 4), "v": ("T", 1, 2), "cos": ("T", 1), "sin": ("T", 1)}
    caches = {"k_cache": (2, 1, 2, 4), "v_cache": (2, 1, 2, 2)}
    step = {"starts": [0, 3], "lengths": [3], "tables": [[1, 0]]}
    integers = {name: torch.tensor(value, dtype=torch.int32) for name, value in {"slots": [2, 3, 0], **step}.items()}
    return Example(_layer, {**tensors, **caches, **integers, "interleaved": interleaved})


fuse_rope_kv_write = GraphPass(
    "fuse_rope_kv_write",
    run,
    Numerics.EXACT,
    Stage.OPTIMIZED,
    examples=(_example(interleaved=False), _example(interleaved=True)),
)


def _find(write: fx.Node, k: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The rotated queries that go with a write, and the attention that reads them."""
    k_cache = call_arguments(write)["k_cache"]
    readers = [u for u in k_cache.users if u.target is _ATTENTION]
    if len(readers) != 1:
        raise Refused(f"{k_cache.name} is read by {len(readers)} attentions", write)
    q = call_arguments(readers[0])["q"]
    if q.target is not _ROPE:
        raise Refused(f"the keys are rotated, but the queries are {q.name}, a {q.target}", q)
    later = [user for user in q.users if readers[0] < user]
    used_only_by(q, (*readers, *later))
    used_only_by(k, (write,))
    turn, k_turn = call_arguments(q), call_arguments(k)
    for name in ("cos", "sin", "interleaved"):
        if turn[name] is not k_turn[name]:
            raise Refused(f"{name} is {turn[name]} for the queries and {k_turn[name]} for the keys", k)
    tensors = {"q": turn["x"], "k": k_turn["x"], "v": call_arguments(write)["v"]}
    dtypes = {name: node.meta["val"].dtype for name, node in tensors.items()}
    if len(set(dtypes.values())) != 1:
        raise Refused(f"dtypes differ: {', '.join(f'{n} is {d}' for n, d in dtypes.items())}", write)
    return q, readers[0]


def _fuse(graph: ModelGraph, q: fx.Node, k: fx.Node, write: fx.Node, attention: fx.Node) -> None:
    turn, written = call_arguments(q), call_arguments(write)
    # Right before the attention: only there are q, k and v all known, and nothing else reads what is rotated.
    with graph.graph.inserting_before(attention):
        rotated = graph.graph.call_function(
            _FUSED,
            (
                turn["x"],
                call_arguments(k)["x"],
                written["v"],
                turn["cos"],
                turn["sin"],
                written["k_cache"],
                written["v_cache"],
                written["slot_mapping"],
                turn["interleaved"],
                *(() if written["cache_format"] is None else (written["cache_format"],)),
            ),
        )
    q.replace_all_uses_with(rotated)
    for dead in (write, q, k):
        graph.graph.erase_node(dead)
