"""The lowered step as data: what program.json holds. Codegen writes it, the runtime and the reports read it.

A step's tensors are matrices of rows: T tokens, L requested logit rows, or a constant number of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class RowCount(Enum):
    """How many rows a buffer has in a step: one a token, one a requested logit row, or a fixed single one."""

    TOKENS = "T"
    LOGIT_ROWS = "L"
    ONE = "1"


class Layout(Enum):
    """How a weight lies in the file.

    ROWS: row-major, as in the checkpoint. PANELS: for linear, lm_head and embedding (kernels/api.h).
    GATED_PANELS: the same with gate and up rows side by side. VECTOR_F32: a vector widened to fp32.
    """

    ROWS = "rows"
    PANELS = "panels"
    GATED_PANELS = "gated_panels"
    VECTOR_F32 = "vector_f32"


@dataclass(frozen=True)
class Affine:
    """A byte count `constant + tokens·T + logit_rows·L`."""

    constant: int = 0
    tokens: int = 0
    logit_rows: int = 0

    def at(self, *, tokens: int, logit_rows: int) -> int:
        """The value for T tokens and L logit rows."""
        return self.constant + self.tokens * tokens + self.logit_rows * logit_rows


@dataclass(frozen=True)
class Buffer:
    """An intermediate in the arena: rows × columns elements, row-major, at byte `offset`.

    dtype: a safetensors name (F32, BF16, I32).
    """

    name: str
    dtype: str
    rows: RowCount
    columns: int
    offset: Affine
    first_launch: int
    last_launch: int


@dataclass(frozen=True)
class WeightSlot:
    """One weight pointer handed to the engine: `name` in weights/*.safetensors, `shape` as in the graph.

    nbytes: of the stored tensor in `layout`, padding included.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    nbytes: int


@dataclass(frozen=True)
class CacheSlot:
    """One layer's pair of cache pointers: each [blocks, kv_heads, block_size, head_dim or value_dim]."""

    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of keys and values of one block of this layer."""
        width = {"F32": 4, "BF16": 2, "F16": 2}[self.dtype]
        return self.kv_heads * block_size * (self.head_dim + self.value_dim) * width


@dataclass(frozen=True)
class Origin:
    """Where a launch comes from: graph nodes, the last rewrite that made it, and the model's source line."""

    nodes: tuple[str, ...]
    rewrite: str | None
    source: str | None


@dataclass(frozen=True)
class Launch:
    """One kernel call.

    bytes_moved and flops are sympy expressions in T, L and C (cached positions read, summed over requests), as text.
    """

    kernel: str
    arguments: dict[str, str | int | float | bool | None]
    origin: Origin
    bytes_moved: str
    flops: str


@dataclass(frozen=True)
class Limits:
    """What the static buffers allow: tokens, requests and logit rows a step, tokens a sequence, positions a block."""

    max_batch_tokens: int
    max_sequences: int
    max_logit_rows: int
    max_model_len: int
    block_size: int


@dataclass(frozen=True)
class Program:
    """Everything that an executor needs beside the weights' data."""

    limits: Limits
    vocab_size: int
    arena: Affine
    unplanned_arena: Affine
    buffers: tuple[Buffer, ...]
    weights: tuple[WeightSlot, ...]
    caches: tuple[CacheSlot, ...]
    launches: tuple[Launch, ...] = field(default=())
