"""The rows that an engine keeps at each cut, found by their bytes in its caches, and what it chooses them from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from llmc.engine_format.reader import read_engine
from llmc.formats.cache_format import parts_of_pair
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.ops.compact_kv import Compaction
from llmc.ops.rotate_heads import rotated
from llmc.ops.score_keys import last_queries, stored_rows
from llmc.program import CachePolicy, Program
from llmc.program.program import CacheSlot
from llmc.program.slot_views import cache_views
from llmc.runtime.engine import Engine
from tests.end_to_end.reference_answer import Kept


@dataclass(frozen=True)
class WatchedLayer:
    """What the caches of one layer held before a compaction, decoded.

    keys, values: [kv_heads, rows, channels]. queries: [queries, heads, channels]; None if there are none.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor | None


@dataclass(frozen=True)
class Watched:
    """A compaction: an update of scores, or a cut. kept: the rows that stay, if the request loses some."""

    this: Compaction
    layers: list[WatchedLayer]
    kept: Kept | None


def watch_cuts(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, is_spread: bool = False) -> list[Watched]:
    """A list that grows with each compaction of the engine's tables. is_spread: whether caches hold rotated heads."""
    executor: Any = engine.loop.executor
    compact, program, found = executor.compact, read_engine(engine.path).program, list[Watched]()
    built = next(policy for policy in program.policies if policy.per_request)

    def watched(numbers: npt.NDArray[np.int32]) -> None:
        this = Compaction.of(torch.from_numpy(numbers.copy()), program.limits.block_size)
        before, queries = (_memories(engine, executor, program, policy) for policy in (built, built.queries))
        compact(numbers)
        kept = None
        # With a second reading, only the first `tokens` rows are the request's.
        if this.kept < min(this.rows, this.tokens):
            after = _memories(engine, executor, program, built)
            kept = [_sources(*each, this) for each in zip(_pairs(before), _pairs(after), strict=True)]
        found.append(Watched(this, _decoded(before, queries, this, program, is_spread), kept))

    monkeypatch.setattr(executor, "compact", watched)
    return found


@dataclass(frozen=True)
class _Memory:
    """One cache: uint8 [blocks, kv_heads, block_size, bytes per row]. part: k or v."""

    slot: CacheSlot
    part: str
    bytes: npt.NDArray[np.uint8]


def _memories(engine: Engine, executor: Any, program: Program, policy: CachePolicy | None) -> list[_Memory]:
    """The caches of the layers of a policy's group, keys and values in turn."""
    if policy is None:
        return []
    group, size = 1 + program.policies.index(policy), program.limits.block_size
    caches = program.caches_of(group)
    blocks = executor.read_blocks(range(engine.loop.groups[group - 1].pool.count), group)()
    widths = [slot.key_and_value_bytes(size)["kv".index(name[-1])] for name, slot in caches.items()]
    parts = np.split(blocks, np.cumsum(widths)[:-1], axis=1)
    return [
        _Memory(slot, name[-1], np.ascontiguousarray(part).reshape(len(part), slot.kv_heads, size, -1))
        for (name, slot), part in zip(caches.items(), parts, strict=True)
        if slot.head_dim > 1  # Others hold a number about each row, which a cut may change.
    ]


def _pairs(memories: list[_Memory]) -> list[tuple[_Memory, _Memory]]:
    return list(zip(memories[::2], memories[1::2], strict=True))


def _decoded(
    caches: list[_Memory], queries: list[_Memory], this: Compaction, program: Program, is_spread: bool
) -> list[WatchedLayer]:
    found = list[WatchedLayer]()
    for index, pair in enumerate(_pairs(caches)):
        rows = [
            stored_rows(_tensor(each), this, width, parts_of_pair(each.slot.format)["kv".index(each.part)]).float()
            for each, width in zip(pair, (pair[0].slot.head_dim, pair[0].slot.value_dim), strict=True)
        ]
        keys, values = (rotated(each) if is_spread else each for each in rows)
        q = None
        if queries and len(this.queries):
            first, second = (_tensor(each) for each in _pairs(queries)[index])
            q = last_queries(first, second, this)
            q = rotated(q) if is_spread else q
        found.append(WatchedLayer(keys.transpose(0, 1), values.transpose(0, 1), q))
    return found


def _tensor(memory: _Memory) -> Tensor:
    """The cache as ops take it."""
    cache = torch.from_numpy(memory.bytes)
    return cache if memory.slot.format is not None else cache.view(TORCH_DTYPES[memory.slot.dtype])


def _sources(before: tuple[_Memory, ...], after: tuple[_Memory, ...], this: Compaction) -> list[list[int]]:
    """The numbers that the kept rows of each KV head had before."""
    old, new = _row_bytes(before, this.blocks, this.rows), _row_bytes(after, this.places, this.kept)
    found = list[list[int]]()
    for old_rows, new_rows in zip(old, new, strict=True):
        numbers = {row: number for number, row in enumerate(old_rows)}
        assert len(numbers) == len(old_rows), "two rows of a head have the same bytes"
        found.append([numbers[row] for row in new_rows])
    return found


def _row_bytes(pair: tuple[_Memory, ...], blocks: Tensor, count: int) -> list[list[bytes]]:
    """The bytes of the first rows in these blocks, of keys and then of values, by KV head."""
    parts = list[npt.NDArray[np.uint8]]()
    for memory in pair:
        size, own = memory.bytes.shape[2], np.ascontiguousarray(memory.bytes[blocks.numpy()])
        views = cache_views(memory.slot, memory.part, own.reshape(len(own), -1), size)
        # [blocks, heads, runs, block_size, bytes] each
        parts += [view.transpose(1, 0, 3, 2, 4).reshape(memory.slot.kv_heads, len(own) * size, -1) for view in views]
    return [[row.tobytes() for row in head[:count]] for head in np.concatenate(parts, axis=2)]
