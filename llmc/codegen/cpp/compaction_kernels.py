"""Kernels that score and move rows of the KV cache between two steps."""

from collections.abc import Callable, Sequence

import torch
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.cpp.cache_kernels import CODED_HEAD
from llmc.codegen.cpp.kernel import DTYPES, Arguments, Kernel, named_arguments
from llmc.codegen.cpp.kernel_library import function_name
from llmc.formats.cache_format import parse_cache_format
from llmc.graph.axes import tensor_axes
from llmc.graph.refusal import Refusal
from llmc.targets import CpuTarget

_SCORED = tensor_axes("q_first[_ | heads _ half] k_cache[_ | kv_heads block_size _]")
_MOVED = tensor_axes("k_cache[_ | kv_heads block_size _]")
_SUMS = tensor_axes("sums[_ | kv_heads block_size _]")
_EXPECTED = tensor_axes("k_cache[_ | kv_heads block_size _] means[heads _] inv_freq[half]")
_TURNED = tensor_axes("k_cache[_ | kv_heads block_size _] inv_freq[half]")


def scored() -> Kernel:
    """The kernel of llmc::score_keys."""

    def sums(call: Call) -> Arguments:
        columns = call.shape("k_cache")[0] * call.plain("longest")
        return {"sums": call.workspace("sums", 1, columns, torch.float32).pointer}

    return _reading_queries("score_keys", ("scores",), sums)


def updated(family: str) -> Kernel:
    """A kernel that updates scores by the queries since the last update."""
    return _reading_queries(family, ("scores",), lambda call: {"sums": call.cache("sums")})


def standing_out() -> Kernel:
    """The kernel of llmc::score_leverage."""

    def more(call: Call) -> Arguments:
        rows, longest = call.shape("k_cache")[0], call.plain("longest")
        turning = 0 if call.plain("inv_freq") is None else call.shape("inv_freq")[0]
        arguments: Arguments = {name: call.cache(name) for name in ("v_cache", "attention", "positions")}
        arguments |= {"turning": turning, "pooled": call.workspace("pooled", 1, rows * longest, torch.float32).pointer}
        if turning:
            arguments["angles"] = call.workspace("angles", 1, 2 * longest * turning, torch.float32).pointer
        return arguments

    return _reading_queries("score_leverage", ("scores", "new_attention", "new_positions"), more)


def expected() -> Kernel:
    """The kernel of llmc::score_expected."""

    def element_types(call: Call) -> tuple[str, ...]:
        return (_codes(call),)

    def arguments(call: Call) -> Arguments:
        (heads, width), (half,) = call.shape("means"), call.shape("inv_freq")
        format = call.plain("cache_format")
        more: Arguments = {
            "channels": width - half,
            "k_cache": call.cache("k_cache"),
            "cache_group": None if format is None else parse_cache_format(format).group,
            "cache_format": None,
        }
        for name, columns in (("weights", width), ("expected", call.plain("longest"))):
            more[name] = call.workspace(name, 1, heads * columns, torch.float32).pointer
        return named_arguments(call, function_name("score_expected", element_types(call)), _EXPECTED, ("scores",), more)

    def refusal(node: fx.Node, target: CpuTarget) -> Refusal | None:
        given = arguments_of(node)
        channels = given["means"].meta["val"].shape[1] - given["inv_freq"].meta["val"].shape[0]
        if channels > CODED_HEAD:
            return Refusal(f"heads have {channels} channels; the kernel takes {CODED_HEAD} at most", node)
        return None

    return Kernel("score_expected", element_types, arguments, refusal)


def joined() -> Kernel:
    """The kernel of llmc::join_scores."""

    def arguments(call: Call) -> Arguments:
        more: Arguments = {"heads": call.shape("scores")[-1] // call.plain("longest")}
        return named_arguments(call, function_name("join_scores", ()), {}, ("joined",), more)

    return Kernel("join_scores", lambda call: (), arguments, lambda node, target: None)


def sums_kept() -> Kernel:
    """The kernel of llmc::keep_sums."""

    def arguments(call: Call) -> Arguments:
        heads, _, _ = call.shape("sums")
        more: Arguments = {"sums": call.cache("sums"), "longest": call.shape("scores")[-1] // heads}
        return named_arguments(call, function_name("keep_sums", ()), _SUMS, (), more)

    return Kernel("keep_sums", lambda call: (), arguments, lambda node, target: None)


def _reading_queries(family: str, results: Sequence[str], others: Callable[[Call], Arguments]) -> Kernel:
    """A kernel that scores rows by the last queries. results, others: as named_arguments takes them."""

    def element_types(call: Call) -> tuple[str, ...]:
        return DTYPES[call.dtype("q_first")], _codes(call)

    def arguments(call: Call) -> Arguments:
        format = call.plain("cache_format")
        more: Arguments = {name: call.cache(name) for name in ("q_first", "q_second", "k_cache")}
        more |= {
            "cache_group": None if format is None else parse_cache_format(format).group,
            "cache_format": None,
        }
        function = function_name(family, element_types(call))
        return named_arguments(call, function, _SCORED, results, more | others(call))

    def refusal(node: fx.Node, target: CpuTarget) -> Refusal | None:
        given = arguments_of(node)
        half = given["q_first"].meta["val"].shape[3]
        if 2 * half > CODED_HEAD:
            return Refusal(f"heads have {2 * half} channels; the kernel takes {CODED_HEAD} at most", node)
        return None

    return Kernel(family, element_types, arguments, refusal)


def moved() -> Kernel:
    """The kernel of llmc::compact_kv, which copies bytes."""

    def arguments(call: Call) -> Arguments:
        heads, _, _ = call.shape("k_cache")
        more = _stored(call) | {"head_dim": None, "longest": call.shape("scores")[-1] // heads}
        return named_arguments(call, function_name("compact_kv", ()), _MOVED, (), more)

    return Kernel("compact_kv", lambda call: (), arguments, lambda node, target: None)


def turned() -> Kernel:
    """The kernel of llmc::turn_rows."""

    def element_types(call: Call) -> tuple[str, ...]:
        return (_codes(call),)

    def arguments(call: Call) -> Arguments:
        format = call.plain("cache_format")
        group = None if format is None else parse_cache_format(format).group
        function = function_name("turn_rows", element_types(call))
        return named_arguments(call, function, _TURNED, (), _stored(call) | {"cache_group": group})

    def refusal(node: fx.Node, target: CpuTarget) -> Refusal | None:
        channels = arguments_of(node)["head_dim"]
        if channels > CODED_HEAD:
            return Refusal(f"heads have {channels} channels; the kernel takes {CODED_HEAD} at most", node)
        return None

    return Kernel("turn_rows", element_types, arguments, refusal)


def _stored(call: Call) -> Arguments:
    """The caches, and how a row of one head is stored in them."""
    more: Arguments = {name: call.cache(name) for name in ("k_cache", "v_cache")}
    for part, name in (("key", "head_dim"), ("value", "value_dim")):
        codes, scales = _row(call, call.plain(name))
        more |= {f"{part}_bytes": codes, f"{part}_scales": scales}
    return more | {"value_dim": None, "cache_format": None}


def _codes(call: Call) -> str:
    format = call.plain("cache_format")
    return DTYPES[call.dtype("k_cache")] if format is None else parse_cache_format(format).codes


def _row(call: Call, channels: int) -> tuple[int, int]:
    """Bytes of a row of one head, and the number of its scales and minima."""
    format = call.plain("cache_format")
    if format is None:
        return channels * call.dtype("k_cache").itemsize, 0
    parsed = parse_cache_format(format)
    codes = parsed.code_bytes(channels)
    return codes, (parsed.position_bytes(channels) - codes) // 2
