"""Made-up operands of an engine's products and attention, as the arguments that kernels/api.h declares."""

import ctypes
from dataclasses import dataclass
from typing import Any

from llmc.codegen.cpp.kernel_api import kernel_api
from llmc.codegen.cpp.kernel_library import function_name
from llmc.codegen.cpp.panel import PANEL
from llmc.formats.cache_format import parse_cache_formats
from llmc.formats.code_format import CODE_FORMATS
from llmc.program import ITEMSIZES, CacheSlot, Launch


@dataclass(frozen=True)
class Product:
    """A kind of product. x: F32 or BF16, which plain weights are too. format: the format of a weight's codes, with its
    further fields; None for a plain weight. group: weights of a row that share a float scale, None for all."""

    x: str
    format: str | None = None
    x_format: str = "none"
    scale_type: str = "f32"
    has_zeros: bool = False
    group: int | None = None

    @staticmethod
    def of(launch: Launch) -> "Product":
        """The product of a launch."""
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
        """Bytes of one row of the weight. channels: a multiple of the group."""
        if self.format is None:
            return channels * ITEMSIZES[self.x]
        group = self.group or channels
        codes = CODE_FORMATS[self.format]
        extra = ITEMSIZES[self.scale_type.upper()] * (1 + codes.has_minimum) + 2 * self.has_zeros
        return channels // group * (extra + (codes.step_bits(group) + group * codes.bits) // 8)

    def arguments(self, tokens: int, channels: int, rows: int, x: int, weight: int, y: int) -> ctypes.Structure:
        """The kernel's arguments. x: address of [tokens, channels]; weight: [rows, channels]; y: [tokens, rows]."""
        codes: dict[str, Any] = {}
        if self.format is not None:
            codes = {name: getattr(self, name) for name in ("format", "x_format", "scale_type", "has_zeros")}
            codes["group"] = self.group or channels
        shape = {"tokens": tokens, "in": channels, "out": rows, "activation": "identity", "scale": 1.0}
        return kernel_api().arguments(
            self.function, {**shape, "x": (x, channels), "weight": weight, "y": (y, rows), **codes}
        )


@dataclass(frozen=True)
class Lookup:
    """An embedding in the panels of a tied lm_head. function: the kernel."""

    function: str
    channels: int
    itemsize: int

    @staticmethod
    def of(launch: Launch) -> "Lookup":
        """The lookup of a launch."""
        (dtype,) = launch.dtypes
        return Lookup(launch.kernel, launch.number("channels"), ITEMSIZES[dtype])

    @property
    def row_bytes(self) -> int:
        """Read and written for one token."""
        return 2 * self.channels * self.itemsize

    @property
    def panel_bytes(self) -> int:
        """Bytes of the interleaved rows."""
        return PANEL * self.channels * self.itemsize

    def arguments(self, token: int, weight: int, y: int) -> ctypes.Structure:
        """The kernel's arguments for one id. token: address of the id; weight: address of the table. y: address of the
        id's row in the result."""
        values = {"tokens": 1, "channels": self.channels, "ids": token, "weight": weight, "y": (y, self.channels)}
        return kernel_api().arguments(self.function, values)


@dataclass(frozen=True)
class Attention:
    """A kind of attention, of an engine's shape. function: the kernel. k_width, v_width: elements of one head at one
    position, each of itemsize bytes. latent: as the kernel takes it."""

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
    value_group: int
    latent: int

    @staticmethod
    def of(launch: Launch, cache: CacheSlot, block_size: int) -> "Attention":
        """The attention of a launch over a cache, without newest rows that are apart."""
        k_width, v_width = cache.widths()
        formats = None if cache.format is None else parse_cache_formats(cache.format)
        return Attention(
            function=function_name(launch.family, launch.dtypes[:2]),
            heads=launch.number("heads"),
            kv_heads=cache.kv_heads,
            head_dim=launch.number("head_dim"),
            value_dim=cache.value_dim,
            block_size=block_size,
            k_width=k_width,
            v_width=v_width,
            itemsize=ITEMSIZES[cache.dtype],
            cache_group=0 if formats is None else formats.keys.group or 0,
            value_group=0 if formats is None else formats.values.group or 0,
            latent=launch.number("latent"),
        )

    @property
    def block_bytes(self) -> tuple[int, int]:
        """Bytes of the keys and of the values of a block."""
        rows = self.kv_heads * self.block_size * self.itemsize
        return rows * self.k_width, rows * self.v_width

    def arguments(self, batch: "Batch", q: int, caches: tuple[int, int], y: int) -> ctypes.Structure:
        """The kernel's arguments. q: address of the queries [tokens, heads · head_dim]; caches: addresses of the keys
        and of the values. y: address of the result."""
        arrays = {name: getattr(batch, name) for name in ("query_starts", "context_lens", "block_tables")}
        values = {
            "tokens": batch.queries * batch.requests,
            "requests": batch.requests,
            **{name: getattr(self, name) for name in ("heads", "kv_heads", "head_dim", "value_dim", "block_size")},
            "q": (q, self.heads * self.head_dim),
            "k_cache": caches[0],
            "v_cache": caches[1],
            **{name: ctypes.addressof(array) for name, array in arrays.items()},
            "max_blocks": len(batch.block_tables) // batch.requests,
            "scale": 0.125,
            "y": (y, self.heads * self.value_dim),
            "cache_group": self.cache_group,
            "value_group": self.value_group,
            "latent": self.latent,
        }
        return kernel_api().arguments(self.function, values)


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
    def of(requests: int, queries: int, context: int, blocks: list[int]) -> "Batch":
        """A batch with these blocks, divided equally among the requests."""
        starts = (ctypes.c_int32 * (requests + 1))(*(i * queries for i in range(requests + 1)))
        lens = (ctypes.c_int32 * requests)(*([context] * requests))
        return Batch(requests, queries, context, starts, lens, (ctypes.c_int32 * len(blocks))(*blocks))

    @property
    def pairs(self) -> int:
        """Queries and the keys that each sees."""
        return self.requests * self.queries * (2 * self.context - self.queries + 1) // 2
