"""sum_attention and keep_sums against H2O as it was published, query by query."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.ops.compact_kv import compact_kv
from llmc.ops.kv_write import write_slots
from llmc.ops.sum_attention import keep_sums, sum_attention

BLOCK, KV_HEADS, GROUP, CHANNELS, EVERY = 8, 2, 3, 8, 16
LONGEST, BLOCKS = 64, 16
SINKS, RECENT = 1, 4


class Published:
    """H2O of one head: each query adds its attention to what the keys have, and the rows with the most stay."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.sums: list[float] = []

    def read(self, position: int, queries: Tensor, keys: Tensor) -> None:
        """queries: [group, channels], of one position; keys: [positions, channels]."""
        self.positions.append(position)
        logits = queries @ keys[self.positions].T / CHANNELS**0.5
        attention = logits.softmax(-1).mean(0).tolist()
        self.sums = [a + b for a, b in zip([*self.sums, 0.0], attention, strict=True)]

    def evict(self, kept: int) -> None:
        """Leave the first ones, the last ones and those with the highest sums."""
        rows = len(self.positions)
        free = sorted(range(SINKS, rows - RECENT), key=lambda row: -self.sums[row])[: kept - SINKS - RECENT]
        stay = sorted([*range(SINKS), *free, *range(rows - RECENT, rows)])
        self.positions, self.sums = [self.positions[row] for row in stay], [self.sums[row] for row in stay]


@pytest.mark.parametrize("seed", range(3))
def test_rows_and_sums_are_those_of_the_published_algorithm(seed: int) -> None:
    """Sums are made of 16 queries at a time; the first ones only add, the later ones also evict."""
    generator = torch.Generator().manual_seed(seed)
    count = 4 * EVERY
    q = torch.randn(count, KV_HEADS * GROUP, CHANNELS, generator=generator)
    k = torch.randn(count, KV_HEADS, CHANNELS, generator=generator)
    v = torch.arange(count).float()[:, None, None].expand(count, KV_HEADS, CHANNELS)
    heads = [Published() for _ in range(KV_HEADS)]
    keys, values = torch.zeros(BLOCKS, KV_HEADS, BLOCK, CHANNELS), torch.zeros(BLOCKS, KV_HEADS, BLOCK, CHANNELS)
    first, second = (torch.zeros(BLOCKS, KV_HEADS * GROUP, BLOCK, CHANNELS // 2) for _ in range(2))
    sums = torch.full((BLOCKS, KV_HEADS, BLOCK, 1), 9.0)  # What no row may read.
    halves = q.reshape(count, 2 * KV_HEADS * GROUP, CHANNELS // 2)
    slots = torch.randperm(BLOCKS * BLOCK, generator=generator)[:count]
    write_slots(halves[:, : KV_HEADS * GROUP], first, slots)
    write_slots(halves[:, KV_HEADS * GROUP :], second, slots)
    table, rows = torch.randperm(BLOCKS, generator=generator).tolist(), 0
    for begin in range(0, count, EVERY):
        for position in range(begin, begin + EVERY):
            for head, published in enumerate(heads):
                published.read(position, q[position, head * GROUP : (head + 1) * GROUP], k[:, head])
        own = torch.tensor([table[row // BLOCK] * BLOCK + row % BLOCK for row in range(rows, rows + EVERY)])
        write_slots(k[begin : begin + EVERY], keys, own)
        write_slots(v[begin : begin + EVERY], values, own)
        rows += EVERY
        kept = min(rows, 24) if begin else rows
        numbers = [rows, kept, EVERY, begin + EVERY, 0, *table[: -(-rows // BLOCK)], *table[: -(-kept // BLOCK)]]
        compaction = torch.tensor([*numbers, *slots[begin : begin + EVERY].tolist()]).int()
        scores = sum_attention(first, second, keys, sums, compaction, CHANNELS**-0.5, None, LONGEST)
        compact_kv(keys, values, scores, compaction, CHANNELS, CHANNELS, SINKS, RECENT)
        keep_sums(sums, scores, compaction, SINKS, RECENT)
        for head, published in enumerate(heads):
            if kept < rows:
                published.evict(kept)
            places = torch.arange(kept)
            blocks = torch.tensor(table)[places // BLOCK]
            assert values[blocks, head, places % BLOCK, 0].tolist() == published.positions
            found = sums[blocks, head, places % BLOCK, 0]
            torch.testing.assert_close(found, torch.tensor(published.sums))
        rows = kept
