"""peak_attention and what stays after it, against KVzip as it was published, query by query."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.ops.compact_kv import compact_kv
from llmc.ops.kv_write import write_slots
from llmc.ops.peak_attention import peak_attention
from llmc.ops.sum_attention import keep_sums

BLOCK, KV_HEADS, GROUP, CHANNELS, EVERY = 8, 2, 3, 8, 16
LONGEST, BLOCKS = 96, 16
OWN, KEPT, SINKS = 40, 24, 1


def published(queries: Tensor, keys: Tensor, peaks: list[float]) -> list[float]:
    """The peaks of one head's rows after a part of the reading. queries: [tokens, group, channels]; keys: those of the
    request, then of the part."""
    for place, query in enumerate(queries):
        paid = (query @ keys[: OWN + place + 1].T / CHANNELS**0.5).softmax(-1).amax(0)
        peaks = [max(each) for each in zip(peaks, paid.tolist(), strict=False)]
    return peaks


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_the_published_algorithm(seed: int) -> None:
    """Two parts, whose ends are not those of an update; the second part's rows take the places of the first's."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, LONGEST, KV_HEADS * GROUP, CHANNELS, generator=generator)
    k = torch.randn(2, LONGEST, KV_HEADS, CHANNELS, generator=generator)
    k[1, :OWN] = k[0, :OWN]
    shape = BLOCKS, KV_HEADS, BLOCK, CHANNELS
    keys, values = torch.zeros(shape), torch.zeros(shape)
    first, second = (torch.zeros(BLOCKS, KV_HEADS * GROUP, BLOCK, CHANNELS // 2) for _ in range(2))
    sums = torch.full((BLOCKS, KV_HEADS, BLOCK, 1), 9.0)  # What no row may read.
    table = torch.randperm(BLOCKS, generator=generator)
    slots = (table[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:LONGEST]
    write_slots(torch.arange(OWN).float()[:, None, None].expand(OWN, KV_HEADS, CHANNELS), values, slots[:OWN])

    def compaction(rows: int, kept: int, queries: int) -> Tensor:
        blocks, places = (table[: -(-count // BLOCK)] for count in (rows, kept))
        return torch.cat(
            (torch.tensor([rows, kept, queries, OWN, 0]), blocks, places, slots[rows - queries : rows])
        ).int()

    def update(rows: int, kept: int, queries: int) -> Tensor:
        numbers = compaction(rows, kept, queries)
        scores = peak_attention(first, second, keys, sums, numbers, CHANNELS**-0.5, None, LONGEST)
        compact_kv(keys, values, scores, numbers, CHANNELS, CHANNELS, SINKS, 0)
        keep_sums(sums, scores, numbers, SINKS, 0)
        return scores.view(KV_HEADS, LONGEST)

    assert not update(OWN, OWN, 0).any(), "a reading starts at 0"
    peaks = [[0.0] * OWN for _ in range(KV_HEADS)]
    lengths = (37, 21)
    for part, length in enumerate(lengths):
        rows = OWN + length
        write_slots(k[part, :rows], keys, slots[:rows])
        halves = q[part, OWN:rows].reshape(length, 2 * KV_HEADS * GROUP, CHANNELS // 2)
        write_slots(halves[:, : KV_HEADS * GROUP], first, slots[OWN:rows])
        write_slots(halves[:, KV_HEADS * GROUP :], second, slots[OWN:rows])
        for head in range(KV_HEADS):
            own = q[part, OWN:rows, head * GROUP : (head + 1) * GROUP]
            peaks[head] = published(own, k[part, :rows, head], peaks[head])
        ends = [*range(OWN + EVERY, rows, EVERY), rows]
        for begin, end in zip([OWN, *ends], ends, strict=False):
            kept = KEPT if (part, end) == (1, rows) else OWN
            scores = update(end, kept, end - begin)
        torch.testing.assert_close(scores[:, :OWN], torch.tensor(peaks))
        assert (scores[:, OWN:rows] < 0).all() and not scores[:, rows:].any()
    for head in range(KV_HEADS):
        best = sorted(range(SINKS, OWN), key=lambda row: -peaks[head][row])[: KEPT - SINKS]
        stay = sorted([*range(SINKS), *best])
        places = torch.arange(KEPT)
        assert values[table[places // BLOCK], head, places % BLOCK, 0].tolist() == stay
