"""Keep keys and values as codes, with scales for each position and head, for the option `kv_cache`.

    kv_write(k, v, kc, vc, slots)   ->  kv_write(k, v, kc, vc, slots, "int8")
    paged_attention(q, kc, vc, …)   ->  paged_attention(q, kc, vc, …, "int8", value_dim)
and the caches become bytes (llmc/ops/cache_codes.py). Keys and values may have different formats: "int8/int4:g32". One
rewrite per layer. Scales are computed when keys and values are written, so that no calibration is needed and an entry
never changes; attention's kernels read codes. A `rotated` format has
    kv_write(rotate_heads(k), rotate_heads(v), …);  rotate_heads(paged_attention(rotate_heads(q), …))
instead: scores are the same, and a head's channels share outliers.
With `:recent=N` the caches of a layer's newest rows stay as they are, and their keys and values are rotated as well. A
layer that reads no older rows, except pinned ones, has no second pair of caches, and its only pair gets no codes.
Must have: paged caches, with heads that the format's groups divide. Numerics: lossy.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from llmc.errors import OptionError
from llmc.formats.cache_format import CacheFormats, parse_cache_formats
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import CacheSpec, ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

_ATTENTION = torch.ops.llmc.paged_attention.default


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Change each layer's pair of caches and the ops that use them."""
    if options.kv_cache == "auto":
        return
    format = parse_cache_formats(options.kv_cache)
    inputs = {node.name: node for node in graph.inputs()}
    for spec in graph.caches:
        if spec.format is not None:
            continue
        pair = [inputs[f"kv_cache_{spec.layer}_{part}"] for part in "kv"]
        if _holds_newest_rows(pair[0]):
            continue
        refusal = _refusal(pair[0], format)
        if refusal is not None:
            log.refuse(refusal)
            continue
        check_heads(spec.layer, spec.head_dim, spec.value_dim, format)
        log.step(f"{pair[0].name} + {pair[1].name} to {format}", *pair)
        _quantize(graph, spec, format, pair)


quantize_kv_cache = GraphPass("quantize_kv_cache", run, Numerics.LOSSY, Stage.SERVING, budget=2.0)


def check_heads(layer: int, keys: int, values: int, format: CacheFormats) -> None:
    """Raise OptionError if the format's groups do not divide the heads' channels."""
    for name, channels, of_part in (("keys", keys, format.keys), ("values", values, format.values)):
        if channels % (of_part.group or channels) or channels % 2:
            raise OptionError(
                f"the {name} of layer {layer} have {channels} channels, which {of_part} does not divide",
                at=f"kv_cache={format}",
                fix=f"give each head one scale: kv_cache={_of_whole_heads(format)}"
                if channels % 2 == 0
                else "build with kv_cache=auto",
            )


def _of_whole_heads(format: CacheFormats) -> CacheFormats:
    return replace(format, keys=replace(format.keys, group=None), values=replace(format.values, group=None))


def _holds_newest_rows(keys: fx.Node) -> bool:
    """Whether this cache of keys holds the newest rows of a layer whose other rows are codes."""
    return any(call_arguments(user)["recent_k"] is keys for user in keys.users if user.target is _ATTENTION)


def _refusal(keys: fx.Node, format: CacheFormats) -> Refusal | None:
    """Say why a layer's caches of keys and values stay exact; None if they become codes."""
    if any(user.target is torch.ops.llmc.paged_choose_keys.default for user in keys.users):
        return Refusal("its keys choose which rows attention reads, and codes would choose others", keys)
    reads = [user for user in keys.users if user.target is _ATTENTION]
    if format.recent is None or all(call_arguments(user)["recent_k"] is not None for user in reads):
        return None
    reason = f"its layer reads no row older than the newest {format.recent}, except pinned ones"
    return Refusal(reason, keys, is_asked=True)


def _quantize(graph: ModelGraph, spec: CacheSpec, format: CacheFormats, pair: list[fx.Node]) -> None:
    changed = replace(spec, dtype=torch.uint8, format=format.of_codes)
    for part, node in zip("kv", pair, strict=True):
        shape = (*node.meta["val"].shape[:3], changed.width(part))
        node.meta["val"] = node.meta["val"].new_empty(shape, dtype=torch.uint8)
    users = dict.fromkeys(u for node in pair for u in node.users)
    if format.rotated:
        _rotate(graph, spec, [*users, *_other_writes(users)])
    for user in users:
        extra: dict[str, Any] = {"cache_format": format.stored}
        if user.target is _ATTENTION:
            extra["value_dim"] = spec.value_dim
        user.args, user.kwargs = tuple((call_arguments(user) | extra).values()), {}
    graph.caches = tuple(changed if cache is spec else cache for cache in graph.caches)


def _other_writes(users: Iterable[fx.Node]) -> list[fx.Node]:
    """The writes to the caches of the newest rows that these users of a pair of caches read."""
    recent = [call_arguments(user)["recent_k"] for user in users if user.target is _ATTENTION]
    return [user for keys in recent if keys is not None for user in keys.users if user.target is not _ATTENTION]


def _rotate(graph: ModelGraph, spec: CacheSpec, users: Iterable[fx.Node]) -> None:
    """Rotate what the users of caches are given, and what attention makes of values."""
    inputs = {"q": spec.head_dim, "k": spec.head_dim, "v": spec.value_dim}
    rotated: dict[tuple[fx.Node, int], fx.Node] = {}
    for user in sorted(users):
        given = call_arguments(user)
        for name in (name for name in inputs if name in given):
            of = (given[name], inputs[name])
            with graph.graph.inserting_before(user):
                rotated[of] = rotated[of] if of in rotated else _rotated(graph, *of)
            user.update_arg(list(given).index(name), rotated[of])
        if user.target is _ATTENTION:
            readers = list(user.users)
            with graph.graph.inserting_after(user):
                turned = _rotated(graph, user, spec.value_dim)
            for reader in readers:
                reader.replace_input_with(user, turned)


def _rotated(graph: ModelGraph, x: fx.Node, first: int) -> fx.Node:
    return graph.graph.call_function(torch.ops.llmc.rotate_heads.default, (x, first))
