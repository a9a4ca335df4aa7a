"""Check that a backend has kernels for the requested quantization, before any weight is read."""

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

import llmc.ops  # noqa: F401  (registers the ops that are looked up)
from llmc.codegen.backend import Backend
from llmc.errors import OptionError
from llmc.formats.cache_format import CacheFormats, parse_cache_formats
from llmc.formats.schemes import SCHEMES, Scheme, TokenDefault, on_target
from llmc.graph.code_numbers import code_dtype
from llmc.options import BuildOptions

_llmc = torch.ops.llmc
# A shape that every group size divides: kernels refuse by format and not by size.
_ROWS, _COLUMNS, _TOKENS = 256, 256, 4


def check_kernels(options: BuildOptions, backend: Backend, target: str, tokens: TokenDefault | None = None) -> None:
    """Raise OptionError for a scheme or a KV cache format that the target has no kernel for.

    Args:
        options: The options of the build.
        backend: The backend whose kernels are queried.
        target: The target's name, for errors.
        tokens: How the target rounds tokens by default; None if schemes are checked as they are spelled.
    """
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(options.dtype, torch.bfloat16)
    quantization = options.quantization
    if tokens is not None:
        quantization = on_target(quantization, tokens.in_dtype(options.dtype))
    budget = quantization.budget
    for scheme in quantization.schemes + (() if budget is None else budget.schemes + budget.blocked):
        reason = _scheme_refusal(scheme, backend, dtype)
        if reason is not None:
            raise OptionError(
                f"{target} cannot run the scheme {scheme.name}: {reason}",
                at=f"quantize={scheme.name}",
                fix=_instead(scheme, backend, dtype),
            )
    if options.kv_cache != "auto":
        format = parse_cache_formats(options.kv_cache)
        reason = _cache_refusal(format, backend, dtype)
        if reason is not None:
            raise OptionError(
                f"{target} cannot keep a KV cache in {options.kv_cache}: {reason}",
                at=f"kv_cache={options.kv_cache}",
                fix="build with kv_cache=auto, or with target reference",
            )


def _instead(scheme: Scheme, backend: Backend, dtype: torch.dtype) -> str:
    """Advice for an error: what to use instead of a scheme that the target does not support."""
    known = [s.name for s in SCHEMES.values() if _scheme_refusal(s, backend, dtype) is None]
    return f"it runs {', '.join(known)}" if known else "build without quantize, or with target reference"


def _scheme_refusal(scheme: Scheme, backend: Backend, dtype: torch.dtype) -> str | None:
    with FakeTensorMode():
        columns = scheme.run or _COLUMNS
        x = torch.empty(_TOKENS, columns, dtype=dtype)
        codes = torch.empty(_ROWS, columns, dtype=code_dtype(scheme.format))
        groups = columns // (scheme.columns or columns)
        runs = columns // (scheme.run_of(columns) or scheme.columns or columns)
        scales = torch.empty(_ROWS, runs, dtype=torch.float32 if scheme.columns is None else torch.bfloat16)
        zeros = None if scheme.symmetric else torch.empty(_ROWS, groups, dtype=torch.int8)
        steps = None if scheme.codes.steps is None else torch.empty(_ROWS, groups, dtype=torch.int8)
        minima = torch.empty_like(scales) if scheme.codes.has_minimum else None
        blocked = (steps, minima, None if minima is None else steps) if scheme.codes.is_blocked else ()
        x_scale = torch.empty(1) if scheme.is_static else None
        result = torch.empty(_TOKENS, _ROWS, dtype=dtype)
    graph = fx.Graph()
    arrived: Any = x
    if scheme.activation != "none":
        rounding = (x, x_scale, scheme.activation, torch.float32, scheme.token_group)
        arrived = _call(graph, _llmc.round_tokens.default, rounding, x.float())
    stored = (codes, scales, zeros, scheme.format, torch.float32, *blocked)
    weight = _call(graph, _llmc.dequantize.default, stored, codes.float())
    arguments = (arrived, weight, None, None, "identity", 1.0, dtype)
    return _reason(backend, _call(graph, _llmc.fused_linear.default, arguments, result))


def _cache_refusal(format: CacheFormats, backend: Backend, dtype: torch.dtype) -> str | None:
    with FakeTensorMode():
        heads = torch.empty(_TOKENS, 2, 64, dtype=dtype)
        caches = [
            torch.empty(8, 2, 16, each.position_bytes(64), dtype=torch.uint8) for each in (format.keys, format.values)
        ]
        indices = torch.empty(_TOKENS, dtype=torch.int32)
        table = torch.empty(_TOKENS, 4, dtype=torch.int32)
        exact = [torch.empty(8, 2, 16, 64, dtype=dtype) for _ in "kv"]
    codes = str(format.of_codes)
    write = (heads, heads, *caches, indices, codes)
    read = (heads, *caches, indices, indices, table, 0.125, None, None, None, codes, 64)
    if format.recent is not None:
        read = (*read, None, None, None, False, None, None, None, *exact, table, format.recent)
    writes = _call(fx.Graph(), _llmc.kv_write.default, write, None)
    reads = _call(fx.Graph(), _llmc.paged_attention.default, read, heads)
    return _reason(backend, writes) or _reason(backend, reads)


def _call(graph: fx.Graph, op: OpOverload, args: tuple[Any, ...], result: torch.Tensor | None) -> fx.Node:
    """Append a call; tensors among the arguments become placeholders."""

    def argument(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("a")
        node.meta["val"] = value
        return node

    node = graph.create_node("call_function", op, tuple(map(argument, args)))
    node.meta["val"] = result
    return node


def _reason(backend: Backend, node: fx.Node) -> str | None:
    refusal = backend.refusal(node)
    return None if refusal is None else refusal.reason
