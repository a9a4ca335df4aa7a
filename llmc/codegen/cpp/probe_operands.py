"""Made-up operands of an engine's products and attention, as the arguments that kernels/api.h wants."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from llmc.cache_format import parse_cache_format
from llmc.code_format import CODE_FORMATS
from llmc.codegen.cpp.kernel_library import function_name
from llmc.program import ITEMSIZES, CacheSlot, Launch

PANEL = 32  # LLMC_PANEL
# As api.h numbers them.
_FORMATS = tuple(CODE_FORMATS)
_X_FORMATS = ("none", "int8", "fp8")
_SCALE_TYPES = ("f32", "f16", "bf16")


class Rows(ctypes.Structure):
    """LlmcRows."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class Linear(ctypes.Structure):
    """LlmcLinear."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "in", "out")),
        ("x", Rows),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", Rows),
        ("y", Rows),
        ("activation", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class QuantizedLinear(ctypes.Structure):
    """LlmcQuantizedLinear."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "in", "out", "group")),
        ("x", Rows),
        ("weight", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", Rows),
        ("y", Rows),
        ("activation", ctypes.c_int32),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("format", "x_format", "scale_type", "has_zeros")),
    )


class PagedAttention(ctypes.Structure):
    """LlmcPagedAttention."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("tokens", "requests", "heads", "kv_heads", "head_dim", "value_dim", "block_size")
        ),
        ("q", Rows),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "query_starts", "context_lens", "block_tables")),
        ("max_blocks", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
        ("y", Rows),
        ("cache_group", ctypes.c_int64),
    )


class Embedding(ctypes.Structure):
    """LlmcEmbedding."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "channels")),
        *((name, ctypes.c_void_p) for name in ("ids", "weight")),
        ("y", Rows),
    )


@dataclass(frozen=True)
class Product:
    """A kind of product. x: F32 or BF16, which plain weights are too. format: of a weight's codes, with its further
    fields; None for a plain weight. group: weights of a row that share a scale, None for all."""

    x: str
    format: str | None = None
    x_format: str = "none"
    scale_type: str = "f32"
    has_zeros: bool = False
    group: int | None = None

    @staticmethod
    def of(launch: Launch) -> Product:
        """What a launch multiplies."""
        arguments = launch.arguments
        (x,) = launch.dtypes
        if "format" not in arguments:
            return Product(x)
        group = None if arguments["group"] == arguments["in"] else launch.number("group")
        return Product(
            x,
            format=str(arguments["format"]),
            x_format=str(arguments["x_format"]),
            scale_type=str(arguments["scale_type"]),
            has_zeros=bool(arguments["has_zeros"]),
            group=group,
        )

    @property
    def function(self) -> str:
        """The kernel of api.h."""
        return function_name("linear" if self.format is None else "quantized_linear", (self.x,))

    def row_bytes(self, channels: int) -> int:
        """Of one row of the weight. channels: a multiple of the group."""
        if self.format is None:
            return channels * ITEMSIZES[self.x]
        group = self.group or channels
        extra = ITEMSIZES[self.scale_type.upper()] + 2 * self.has_zeros
        return channels // group * (extra + group * CODE_FORMATS[self.format].bits // 8)

    def arguments(self, tokens: int, channels: int, rows: int, x: int, weight: int, y: int) -> ctypes.Structure:
        """The kernel's, of x [tokens, channels], weight [rows, channels] and y [tokens, rows] at these addresses."""
        common = ((x, channels), weight)
        if self.format is None:
            return Linear(tokens, channels, rows, *common, None, (None, 0), (y, rows), 0, 1.0)
        codes = (_FORMATS.index(self.format), _X_FORMATS.index(self.x_format), _SCALE_TYPES.index(self.scale_type))
        shape = (tokens, channels, rows, self.group or channels)
        return QuantizedLinear(*shape, *common, None, None, (None, 0), (y, rows), 0, 1.0, *codes, self.has_zeros)


@dataclass(frozen=True)
class Lookup:
    """An embedding in the panels of a tied lm_head. function: the kernel."""

    function: str
    channels: int
    itemsize: int

    @staticmethod
    def of(launch: Launch) -> Lookup:
        """What a launch looks up."""
        (dtype,) = launch.dtypes
        return Lookup(launch.kernel, launch.number("channels"), ITEMSIZES[dtype])

    @property
    def row_bytes(self) -> int:
        """Read and written for one token."""
        return 2 * self.channels * self.itemsize

    @property
    def panel_bytes(self) -> int:
        """Of the rows that lie interleaved."""
        return PANEL * self.channels * self.itemsize

    def arguments(self, token: int, weight: int, y: int) -> ctypes.Structure:
        """The kernel's, of one id at that address."""
        return Embedding(1, self.channels, token, weight, (y, self.channels))


@dataclass(frozen=True)
class Attention:
    """A kind of attention, of an engine's shape. function: the kernel. k_width, v_width: elements of one head at one
    position, each of itemsize bytes."""

    function: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    k_width: int
    v_width: int
    itemsize: int
    cache_group: int

    @staticmethod
    def of(launch: Launch, cache: CacheSlot, block_size: int) -> Attention:
        """What a launch computes over a cache."""
        k_width, v_width = cache.widths()
        group = None if cache.format is None else parse_cache_format(cache.format).group
        return Attention(
            function=launch.kernel,
            heads=launch.number("heads"),
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            value_dim=cache.value_dim,
            block_size=block_size,
            k_width=k_width,
            v_width=v_width,
            itemsize=ITEMSIZES[cache.dtype],
            cache_group=group or 0,
        )

    @property
    def block_bytes(self) -> tuple[int, int]:
        """Of the keys and of the values of a block."""
        rows = self.kv_heads * self.block_size * self.itemsize
        return rows * self.k_width, rows * self.v_width

    def arguments(self, batch: Batch, q: int, caches: tuple[int, int], y: int) -> ctypes.Structure:
        """The kernel's, of queries [tokens, heads · head_dim] and two caches at these addresses."""
        return PagedAttention(
            batch.queries * batch.requests,
            batch.requests,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.value_dim,
            self.block_size,
            (q, self.heads * self.head_dim),
            *caches,
            *(ctypes.addressof(array) for array in (batch.query_starts, batch.context_lens, batch.block_tables)),
            len(batch.block_tables) // batch.requests,
            0.125,
            0,
            0.0,
            None,
            (y, self.heads * self.value_dim),
            self.cache_group,
        )


@dataclass(frozen=True)
class Batch:
    """Requests that are alike: each with its last `queries` tokens of `context`. blocks: which the requests have."""

    requests: int
    queries: int
    context: int
    query_starts: Any
    context_lens: Any
    block_tables: Any

    @staticmethod
    def of(requests: int, queries: int, context: int, blocks: list[int]) -> Batch:
        """With these blocks, as many for each request."""
        starts = (ctypes.c_int32 * (requests + 1))(*(i * queries for i in range(requests + 1)))
        lens = (ctypes.c_int32 * requests)(*([context] * requests))
        return Batch(requests, queries, context, starts, lens, (ctypes.c_int32 * len(blocks))(*blocks))

    @property
    def pairs(self) -> int:
        """Queries and the keys that each sees."""
        return self.requests * self.queries * (2 * self.context - self.queries + 1) // 2
