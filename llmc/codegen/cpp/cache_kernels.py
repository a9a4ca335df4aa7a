"""Kernels that read or write the KV cache, whose elements are numbers or codes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.cpp.kernel import (
    DTYPES,
    Arguments,
    Kernel,
    by_name,
    named_arguments,
    no_more,
    refuse_dtypes,
    refuse_ranks,
)
from llmc.codegen.cpp.kernel_library import function_name
from llmc.codegen.newest_rows import refuse_newest_rows
from llmc.formats.cache_format import parse_cache_formats
from llmc.graph.axes import tensor_axes
from llmc.graph.refusal import Refusal
from llmc.ops.rotate_heads import rotation_block
from llmc.program.launch_arguments import Count
from llmc.targets import CpuTarget

CODED_HEAD = 1024  # LLMC_CODED_HEAD
ROTATED_BLOCK = 1024  # LLMC_ROTATED_BLOCK
# Codes of keys and of other codes of values that there are kernels for.
_PAIRS = (("int8", "int4"),)
_CACHE = " k_cache[_ | kv_heads block_size _]"


def caching(
    family: str,
    axes: str,
    *,
    results: Sequence[str],
    in_place: tuple[tuple[str, int], ...] = (),
    more: Callable[[Call], Arguments] = no_more,
) -> Kernel:
    """A kernel with the arguments k_cache, v_cache and cache_format, by name otherwise (kernel.by_name).

    Its functions are distinguished by the element types of the first argument, of the cache, and of the newest rows if
    they are apart.
    """
    tensors = tensor_axes(axes + _CACHE)
    first = next(iter(tensors))

    def element_types(call: Call) -> tuple[str, ...]:
        format = call.plain("cache_format")
        cached = DTYPES[call.dtype("k_cache")] if format is None else codes_of_pair(format)
        return DTYPES[call.dtype(first)], cached, *(DTYPES[call.dtype(name)] for name in _recent_caches(call)[:1])

    def arguments(call: Call) -> Arguments:
        function = function_name(family, element_types(call))
        return named_arguments(call, function, tensors, results, _of_caches(call) | more(call))

    def refusal(node: fx.Node, target: CpuTarget) -> Refusal | None:
        is_plain = arguments_of(node)["cache_format"] is None
        read = (first, *(("k_cache",) if is_plain else ()))
        refused = refuse_dtypes(node, read) or _refuse_odd_keys(node) or _refuse_recent(node)
        return refused or (refuse_ranks(node, tensors) if is_plain else _refuse_wide_heads(node) or _refuse_pair(node))

    return Kernel(family, element_types, arguments, refusal, in_place)


def rotating() -> Kernel:
    """The kernel that rotates heads for a cache of codes."""
    plain = by_name("rotate_heads", "x[tokens | heads head_dim]", in_place=(("x", 0),))

    def refusal(node: fx.Node, target: CpuTarget) -> Refusal | None:
        arguments = arguments_of(node)
        channels, first = arguments["x"].meta["val"].shape[2], arguments["first"]
        block = max(map(rotation_block, (first, channels - first)))
        if block > ROTATED_BLOCK:
            return Refusal(f"blocks of {block} channels; the kernel rotates {ROTATED_BLOCK} at most", node)
        return plain.refusal(node, target)

    return replace(plain, refusal=refusal)


def codes_of_pair(text: str) -> str:
    """The codes of keys and values in the names of functions: once if they are the same, else both."""
    formats = parse_cache_formats(text)
    return "_".join(dict.fromkeys((formats.keys.codes, formats.values.codes)))


def attended(call: Call) -> Arguments:
    """Further arguments of paged attention, in addition to its op's."""
    value_dim = call.plain("value_dim") or call.shape("v_cache")[2]
    latent = value_dim if call.plain("latent") else 0
    own_sinks = call.plain("sinks") is not None and call.count("sinks") is Count.TOKENS
    return {
        "requests": Count.REQUESTS,
        "max_blocks": Count.MAX_BLOCKS,
        "value_dim": value_dim,
        "latent": latent,
        "sink_stride": call.shape("q")[0] if own_sinks else 0,
        "chosen_count": 0 if call.plain("chosen") is None else call.shape("chosen")[0],
        "extent": 0 if call.plain("bias") is None else call.shape("bias")[1],
    }


def _of_caches(call: Call) -> Arguments:
    """Further arguments of the caches' kernels, in addition to their ops'. cache_group, value_group: groups of
    codes of keys and of values, 0 for a whole head."""
    format = call.plain("cache_format")
    caches = {name: call.cache(name) for name in ("k_cache", "v_cache")}
    formats = None if format is None else parse_cache_formats(format)
    groups = (None, None) if formats is None else (formats.keys.group, formats.values.group)
    caches |= {name: call.cache(name) for name in _recent_caches(call)}
    return {**caches, "cache_format": None, "cache_group": groups[0], "value_group": groups[1]}


def _recent_caches(call: Call) -> tuple[str, ...]:
    """The names of the arguments that are the caches of newest rows; none if these are not apart."""
    is_apart = "recent_k" in call.names() and call.plain("recent_k") is not None
    return ("recent_k", "recent_v") if is_apart else ()


def _refuse_odd_keys(node: fx.Node) -> Refusal | None:
    arguments = arguments_of(node)
    if not arguments.get("latent"):
        return None
    own = arguments["q"].meta["val"].shape[2] - (arguments["value_dim"] or arguments["v_cache"].meta["val"].shape[3])
    return Refusal(f"keys have {own} channels before the values': kernels multiply pairs", node) if own % 2 else None


def _refuse_recent(node: fx.Node) -> Refusal | None:
    arguments = arguments_of(node)
    if arguments.get("recent") is None:
        return None
    return refuse_newest_rows(node) or refuse_dtypes(node, ("recent_k", "recent_v"))


def _refuse_pair(node: fx.Node) -> Refusal | None:
    formats = parse_cache_formats(arguments_of(node)["cache_format"])
    keys, values = formats.keys.codes, formats.values.codes
    if keys == values or (keys, values) in _PAIRS:
        return None
    known = ", ".join("/".join(pair) for pair in _PAIRS)
    return Refusal(f"keys in {keys} and values in {values}; kernels take {known}, or one kind of codes", node)


def _refuse_wide_heads(node: fx.Node) -> Refusal | None:
    arguments = arguments_of(node)
    tensors = [arguments[name].meta["val"] for name in ("q", "k", "v") if name in arguments]
    widest = max(*(tensor.shape[2] for tensor in tensors), arguments.get("value_dim") or 0)
    if widest > CODED_HEAD:
        return Refusal(f"heads have {widest} channels; kernels put {CODED_HEAD} at most into codes", node)
    return None
