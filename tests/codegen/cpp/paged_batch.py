"""Ragged batches over a shuffled paged cache, and llmc_paged_attention run on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmc.codegen.cpp.cache_kernels import codes_of_pair
from llmc.formats.cache_format import CacheFormats
from llmc.ops.cache_codes import write_codes
from llmc.ops.choose_keys import NO_PLACE
from llmc.ops.paged_attention import paged_attention
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, kernels, pointer, rows

# Options of paged_batch that limit or change scores: what holds over one cache holds over two.
SCORE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"window": 50},
    {"window": 9},
    {"window": 50, "pinned": 7},
    {"pinned": 70, "window": 41},
    {"chunk": 30},
    {"chunk": 100, "window": 60},
    {"sinks": True, "softcap": 2.0},
    {"slopes": True},
    {"kv_heads": 1, "value_dim": 64, "latent": True},
)


@dataclass(frozen=True)
class Newest:
    """Caches of the newest `count` rows of each token, and the blocks of each request in them. lens: rows of each
    request in them, where rows have left the other caches."""

    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    count: int
    lens: Tensor | None = None


@dataclass(frozen=True)
class PagedBatch:
    """The tensor arguments of llmc::paged_attention, and its options. format, value_dim: of caches of codes. newest: of
    rows that are read apart."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    format: CacheFormats | None = None
    value_dim: int | None = None
    tree_masks: Tensor | None = None
    slopes: Tensor | None = None
    chunk: int | None = None
    latent: bool = False
    bias: Tensor | None = None
    chosen: Tensor | None = None
    pinned: int | None = None
    newest: Newest | None = None

    def apart(self, format: CacheFormats, count: int, dtype: torch.dtype | None = None, slack: int = 0) -> PagedBatch:
        """The same over codes and, in other blocks, the newest `count` rows of each token, as numbers of a dtype.

        Blocks without such rows are NaN, except the row before them: products of bf16 take rows in pairs, and where
        blocks have an odd number of rows, zero times that row is added. slack: as for runtime.GroupPool.
        """
        order = torch.randperm(len(self.k_cache), generator=torch.Generator().manual_seed(7))
        near = replace(self, window=count + slack + 1, pinned=None).without_freed_blocks()
        caches = [torch.empty_like(cache, dtype=dtype) for cache in (near.k_cache, near.v_cache)]
        for cache, own in zip(caches, (near.k_cache, near.v_cache), strict=True):
            cache[order] = own.to(cache.dtype)
        used = self.block_tables >= 0
        tables = torch.where(used, order[self.block_tables.clamp(min=0).long()].int(), self.block_tables)
        return replace(self.coded(format), newest=Newest(caches[0], caches[1], tables, count))

    def behind_cut(self, blocks: int) -> PagedBatch:
        """The same after the first blocks of each table have left, except where tokens read newest rows in them."""
        assert self.newest is not None
        size, rows = self.k_cache.shape[2], self.query_starts.diff() + self.newest.count
        is_cut = self.context_lens - blocks * size >= rows
        tables = torch.where(is_cut[:, None], self.block_tables.roll(-blocks, 1), self.block_tables)
        lens = torch.where(is_cut, self.context_lens - blocks * size, self.context_lens)
        newest = replace(self.newest, lens=self.context_lens)
        return replace(self, block_tables=tables.contiguous(), context_lens=lens, newest=newest)

    def coded(self, format: CacheFormats) -> PagedBatch:
        """The same over caches of codes; what no request may read becomes huge."""
        caches = []
        for cache, own in ((self.k_cache, format.keys), (self.v_cache, format.values)):
            blocks, heads, block_size, channels = cache.shape
            coded = torch.zeros(blocks, heads, block_size, own.position_bytes(channels), dtype=torch.uint8)
            values = cache.float().transpose(1, 2).flatten(0, 1).nan_to_num(nan=1e30)
            write_codes(values, coded, torch.arange(blocks * block_size), str(own))
            caches.append(coded)
        return replace(self, k_cache=caches[0], v_cache=caches[1], format=format, value_dim=self.v_cache.shape[3])

    def without_freed_blocks(self) -> PagedBatch:
        """The same where NaN lies in the blocks that no query sees behind pinned keys and before its window."""
        assert self.window is not None
        block_size, caches = self.k_cache.shape[2], [self.k_cache.clone(), self.v_cache.clone()]
        for table, context, queries in zip(
            self.block_tables, self.context_lens.tolist(), self.query_starts.diff().tolist(), strict=True
        ):
            freed = table[
                -(-(self.pinned or 0) // block_size) : max(0, context - queries + 1 - self.window) // block_size
            ]
            for cache in caches:
                cache[freed.long()] = float("nan")
        return replace(self, k_cache=caches[0], v_cache=caches[1])

    def expected(self) -> Tensor:
        """The reference's result."""
        return paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.query_starts,
            self.context_lens,
            self.block_tables,
            self.scale,
            self.window,
            self.softcap,
            self.sinks,
            None if self.format is None else str(self.format),
            self.value_dim,
            self.tree_masks,
            self.slopes,
            self.chunk,
            self.latent,
            self.bias,
            self.chosen,
            self.pinned,
            *((None,) * 4 if self.newest is None else (self.newest.k_cache, self.newest.v_cache)),
            *(() if self.newest is None else (self.newest.tables, self.newest.count, self.newest.lens)),
        )

    def run(self, target: CpuTarget, threads: int = 2) -> Tensor:
        """The kernel's result, from rows that are wider than they need be."""
        tokens, heads, _ = self.q.shape
        value_dim = self.value_dim or self.v_cache.shape[3]
        wide = torch.full((tokens, heads * value_dim + 3), 7.0).to(self.q.dtype)
        call(target, "paged_attention", self.dtypes, self.values(wide), threads=threads, scratch=self.scratch(target))
        assert bool((wide[:, heads * value_dim :] == 7.0).all())
        y: Tensor = wide[:, : heads * value_dim].unflatten(1, (heads, value_dim))
        return y

    @property
    def dtypes(self) -> tuple[torch.dtype | str, ...]:
        """Of activations, of caches or the cache's codes, and of newest rows apart: they name the kernel."""
        cached = self.k_cache.dtype if self.format is None else codes_of_pair(str(self.format))
        return self.q.dtype, cached, *(() if self.newest is None else (self.newest.k_cache.dtype,))

    def scratch(self, target: CpuTarget) -> int:
        """Bytes that each thread needs."""
        shape = self.q.shape[1], self.k_cache.shape[1], self.q.shape[2], self.value_dim or self.v_cache.shape[3]
        return int(kernels(target).llmc_paged_attention_scratch(*shape))

    def values(self, y: Tensor) -> dict[str, Any]:
        """The kernel's arguments, to write rows y: [tokens, heads·value_dim or more]."""
        return {
            "tokens": self.q.shape[0],
            "requests": len(self.context_lens),
            "heads": self.q.shape[1],
            "kv_heads": self.k_cache.shape[1],
            "head_dim": self.q.shape[2],
            "value_dim": self.value_dim or self.v_cache.shape[3],
            "block_size": self.k_cache.shape[2],
            "q": rows(self.q),
            "k_cache": pointer(self.k_cache),
            "v_cache": pointer(self.v_cache),
            "query_starts": pointer(self.query_starts),
            "context_lens": pointer(self.context_lens),
            "block_tables": pointer(self.block_tables),
            "max_blocks": self.block_tables.shape[1],
            "scale": self.scale,
            "window": self.window or 0,
            "softcap": self.softcap or 0.0,
            "sinks": pointer(self.sinks),
            "y": rows(y),
            "cache_group": 0 if self.format is None else self.format.keys.group or 0,
            "value_group": 0 if self.format is None else self.format.values.group or 0,
            "tree_masks": pointer(self.tree_masks),
            "slopes": pointer(self.slopes),
            "chunk": self.chunk or 0,
            "latent": (self.value_dim or self.v_cache.shape[3]) if self.latent else 0,
            "sink_stride": 0 if self.sinks is None or self.sinks.dim() == 1 else self.sinks.shape[1],
            "bias": pointer(self.bias),
            "extent": 0 if self.bias is None else self.bias.shape[2],
            "pinned": self.pinned or 0,
            "chosen_count": 0 if self.chosen is None else self.chosen.shape[1],
            **({} if self.chosen is None else {"chosen": rows(self.chosen)}),
            **({} if self.newest is None else self._newest_values(self.newest)),
        }

    @staticmethod
    def _newest_values(newest: Newest) -> dict[str, Any]:
        tensors = {"recent_k": newest.k_cache, "recent_v": newest.v_cache, "recent_tables": newest.tables}
        tensors |= {} if newest.lens is None else {"recent_lens": newest.lens}
        return {name: pointer(tensor) for name, tensor in tensors.items()} | {"recent": newest.count}

    def part(self, request: int, first: int, last: int) -> PagedBatch:
        """Tokens [first, last) of one request, as a batch of their own that comes when no later token is there."""
        start, end = self.query_starts[request].item(), self.query_starts[request + 1].item()
        context = int(self.context_lens[request].item() - (end - start) + last)
        own = slice(int(start) + first, int(start) + last)
        return replace(
            self,
            q=self.q[own],
            sinks=self.sinks[own] if self.sinks is not None and self.sinks.dim() == 2 else self.sinks,
            bias=None if self.bias is None else self.bias[own],
            chosen=None if self.chosen is None else self.chosen[own],
            query_starts=torch.tensor([0, last - first], dtype=torch.int32),
            context_lens=torch.tensor([context], dtype=torch.int32),
            block_tables=self.block_tables[request : request + 1].contiguous(),
            newest=None
            if self.newest is None
            else replace(self.newest, tables=self.newest.tables[request : request + 1].contiguous()),
        )


def paged_batch(
    requests: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    token_sinks: bool = False,
    extent: int | None = None,
    chosen: int | None = None,
    slopes: bool = False,
    chunk: int | None = None,
    latent: bool = False,
    pinned: int | None = None,
    shuffled: bool = True,
    seed: int = 0,
) -> PagedBatch:
    """Random data for (context length, query tokens) requests, whose blocks lie shuffled among unused ones or in order.

    What no request may read is NaN: unused blocks, and the rest of each last block. q is a slice of wider rows.
    """
    generator = torch.Generator().manual_seed(seed)
    value_dim = head_dim if value_dim is None else value_dim
    tables, order = _block_tables(requests, block_size, shuffled, generator)
    caches = [
        torch.randn(len(order), kv_heads, block_size, dim, generator=generator).to(cache_dtype or dtype)
        for dim in (head_dim, value_dim)
    ]
    for cache in caches:
        _hide_unread(cache, tables, order, requests)
    tokens = [count for _, count in requests]
    query_dim = head_dim + value_dim if latent else head_dim
    merged = torch.randn(sum(tokens), heads * query_dim + 10, generator=generator).to(dtype)
    return PagedBatch(
        q=merged[:, 5:-5].unflatten(1, (heads, query_dim)),
        k_cache=caches[0],
        v_cache=caches[1],
        query_starts=torch.tensor([0, *tokens]).cumsum(0).int(),
        context_lens=torch.tensor([context for context, _ in requests], dtype=torch.int32),
        block_tables=tables,
        scale=query_dim**-0.5,
        window=window,
        softcap=softcap,
        sinks=torch.randn(*([sum(tokens)] if token_sinks else []), heads, generator=generator)
        if sinks or token_sinks
        else None,
        bias=None if extent is None else torch.randn(sum(tokens), heads, extent, generator=generator),
        slopes=2.0 ** -torch.arange(1.0, heads + 1) if slopes else None,
        chunk=chunk,
        latent=latent,
        pinned=pinned,
        chosen=None if chosen is None else _random_places(requests, chosen, generator),
    )


def _block_tables(
    requests: Sequence[tuple[int, int]], block_size: int, shuffled: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Of each request its blocks; and all blocks, unused ones last."""
    needed = [-(-context // block_size) for context, _ in requests]
    blocks = sum(needed) + 3
    order = torch.randperm(blocks, generator=generator) if shuffled else torch.arange(blocks)
    tables = torch.full((len(requests), max(needed) + 1), -(2**30), dtype=torch.int32)
    used = 0
    for table, count in zip(tables, needed, strict=True):
        table[:count] = order[used : used + count].int()
        used += count
    return tables, order


def _hide_unread(cache: Tensor, tables: Tensor, order: Tensor, requests: Sequence[tuple[int, int]]) -> None:
    block_size, used = cache.shape[2], 0
    for table, (context, _) in zip(tables, requests, strict=True):
        full, rest = divmod(context - 1, block_size)
        cache[table[full], :, rest + 1 :] = float("nan")
        used += full + 1
    cache[order[used:]] = float("nan")


def _random_places(requests: Sequence[tuple[int, int]], count: int, generator: torch.Generator) -> Tensor:
    """Of each token some of the keys up to its own, as llmc::choose_keys gives them."""
    found = torch.full((sum(tokens for _, tokens in requests), count), NO_PLACE, dtype=torch.int32)
    places = [context - tokens + i for context, tokens in requests for i in range(tokens)]
    for token, place in enumerate(places):
        some = torch.randperm(place + 1, generator=generator)[:count].sort().values
        found[token, : len(some)] = some.int()
    return found
