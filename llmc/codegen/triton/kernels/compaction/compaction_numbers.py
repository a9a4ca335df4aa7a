"""The numbers of a compaction (llmc/ops/compact_kv.py): rows, kept rows, queries, tokens, pinned rows; then blocks,
places and slots."""

import triton
import triton.language as tl

_FIRST = tl.constexpr(5)


@triton.jit
def pinned_rows(compaction_ptr: tl.tensor) -> tl.tensor:
    """The number of first rows that are kept in addition to the policy's."""
    return tl.load(compaction_ptr + 4)


@triton.jit
def first_free(compaction_ptr: tl.tensor, SINKS: tl.constexpr) -> tl.tensor:
    """The first row that may leave."""
    return tl.maximum(pinned_rows(compaction_ptr), SINKS)


@triton.jit
def block_of(compaction_ptr: tl.tensor, row: tl.tensor, present: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """The blocks that hold rows, int64."""
    return tl.load(compaction_ptr + _FIRST + row // BLOCK_SIZE, mask=present, other=0).to(tl.int64)


@triton.jit
def place_of(compaction_ptr: tl.tensor, row: tl.tensor, present: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """The blocks that kept rows move to, int64."""
    first = _FIRST + tl.cdiv(tl.load(compaction_ptr), BLOCK_SIZE)
    return tl.load(compaction_ptr + first + row // BLOCK_SIZE, mask=present, other=0).to(tl.int64)


@triton.jit
def slot_of(compaction_ptr: tl.tensor, query: tl.tensor, present: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """The slots of queries, int64."""
    blocks = tl.cdiv(tl.load(compaction_ptr), BLOCK_SIZE)
    first = _FIRST + blocks + tl.cdiv(tl.load(compaction_ptr + 1), BLOCK_SIZE)
    return tl.load(compaction_ptr + first + query, mask=present, other=0).to(tl.int64)
