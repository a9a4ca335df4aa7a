"""score_leverage against Compactor as it was published, and the rows that stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from llmc.ops.compact_kv import compact_kv
from llmc.ops.kv_write import write_slots
from llmc.ops.rope import rotate
from llmc.ops.rotate_heads import rotated
from llmc.ops.score_leverage import gaussian_sketch, score_leverage
from llmc.ops.sum_attention import keep_sums

BLOCK, KV_HEADS, GROUP, CHANNELS = 8, 2, 3, 16
LONGEST, BLOCKS, CHUNK = 128, 24, 32
SINKS, RECENT = 3, 2
SCALE = CHANNELS**-0.5


def published(
    plain: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    chunks: Sequence[range],
    *,
    kept: int,
    sinks: int,
    recent: int,
) -> Tensor:
    """Compactor's scores of rows as kvpress 0.5.4 computes them, by KV head; of those that are protected, infinity.

    What differs: chunks begin at multiples of their length; the scale is the model's; all of a chunk's rows that are
    not sinks take part in its attention.

    Args:
        plain: Keys of all positions before their rotation, [kv_heads, positions, channels].
        q: Queries of all positions, [heads, positions, channels].
        k, v: Keys and values of all positions, [kv_heads, positions, channels].
        positions: Of the rows, [kv_heads, rows].
        chunks: Positions that attend to each other.
    """
    heads, rows = positions.shape
    free, groups = slice(sinks, rows - recent), q.reshape(heads, -1, *q.shape[1:])
    leverages, attentions = torch.zeros(heads, rows), torch.zeros(heads, rows)
    for head in range(heads):
        keys = plain[head, positions[head, free]]
        x = (keys - keys.mean(0)) @ gaussian_sketch(keys.shape[1])
        factor = torch.linalg.cholesky(x.T @ x + 1e-2 * torch.eye(x.shape[1]))
        leverages[head, free] = (x * torch.cholesky_solve(x.T, factor).T).sum(-1).clamp_min(0)
        paid = torch.zeros(k.shape[1])
        for chunk in chunks:
            own = [position for position in chunk if position >= sinks]
            weights = (groups[head][:, own] @ k[head, own].T / k.shape[2] ** 0.5).softmax(-1)
            paid[own] = weights.sum(-2).mean(0)
        attentions[head] = (paid * v[head].norm(dim=-1))[positions[head]]
    pooled = torch.nn.functional.avg_pool1d(attentions[None, :, free], 3, padding=1, stride=1)[0]
    found = torch.full((heads, rows), float("inf"))
    share = 1 - kept / (positions.max() + 1)
    of_keys = leverages[:, free]
    found[:, free] = share * (of_keys - of_keys.mean()) / of_keys.std() + (pooled - pooled.mean()) / pooled.std()
    return found


@pytest.mark.parametrize("interleaved", [None, False, True], ids=["plain", "halves", "interleaved"])
@pytest.mark.parametrize(("seed", "sinks"), [(0, SINKS), (1, 0), (2, 40)])
def test_rows_that_stay_are_those_of_the_published_algorithm(seed: int, sinks: int, interleaved: bool | None) -> None:
    """A prompt of 84 tokens in chunks of 32, cut at its end, and two chunks of 16 of the answer, cut again."""
    generator = torch.Generator().manual_seed(seed)
    ends, budget = [32, 64, 88, 104, 120], 56
    count = ends[-1]
    q, plain = (torch.randn(count, n, CHANNELS, generator=generator) for n in (KV_HEADS * GROUP, KV_HEADS))
    v = torch.randn(count, KV_HEADS, CHANNELS, generator=generator)
    inv_freq, k = torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01]), plain
    if interleaved is not None:
        angles = torch.arange(count)[:, None] * inv_freq
        k = rotate(plain, angles.cos(), angles.sin(), interleaved)
    k_cache, v_cache = (torch.zeros(BLOCKS, KV_HEADS, BLOCK, CHANNELS) for _ in range(2))
    halves = q.reshape(count, 2 * KV_HEADS * GROUP, CHANNELS // 2)
    first, second = (torch.zeros(BLOCKS, KV_HEADS * GROUP, BLOCK, CHANNELS // 2) for _ in range(2))
    attention, positions = (torch.full((BLOCKS, KV_HEADS, BLOCK, 1), 9.0) for _ in range(2))  # What no row may read.
    slots = torch.randperm(BLOCKS * BLOCK, generator=generator)[:count]
    write_slots(halves[:, : KV_HEADS * GROUP], first, slots)
    write_slots(halves[:, KV_HEADS * GROUP :], second, slots)
    table = torch.randperm(BLOCKS, generator=generator).tolist()
    held, chunks, done = torch.zeros(KV_HEADS, 0, dtype=torch.int64), list[range](), 0
    for end in ends:
        before = held.shape[1]
        held = torch.cat((held, torch.arange(done, end).expand(KV_HEADS, -1)), dim=1)
        rows = held.shape[1]
        own = torch.tensor([table[row // BLOCK] * BLOCK + row % BLOCK for row in range(before, rows)])
        write_slots(k[done:end], k_cache, own)
        write_slots(v[done:end], v_cache, own)
        chunks.append(range(done, end))
        kept = rows if end < 84 else budget
        numbers = [rows, kept, end - done, end, 0, *table[: -(-rows // BLOCK)], *table[: -(-kept // BLOCK)]]
        compaction = torch.tensor([*numbers, *slots[done:end].tolist()]).int()
        frequencies = None if interleaved is None else inv_freq
        options = (SCALE, None, sinks, RECENT, CHANNELS, LONGEST)
        read = (first, second, k_cache, v_cache, attention, positions, compaction, gaussian_sketch(CHANNELS))
        scores, new_attention, new_positions = score_leverage(*read, frequencies, bool(interleaved), False, *options)
        if kept < rows:
            of_all = [x.transpose(0, 1) for x in (plain, q, k, v)]
            expected = published(
                of_all[0], of_all[1], of_all[2], of_all[3], held, chunks, kept=kept, sinks=sinks, recent=RECENT
            )
            free = slice(sinks, rows - RECENT)
            torch.testing.assert_close(scores.view(KV_HEADS, -1)[:, free], expected[:, free], atol=1e-4, rtol=1e-4)
            held = held.gather(1, expected.topk(kept).indices.sort(-1).values)
        compact_kv(k_cache, v_cache, scores, compaction, CHANNELS, CHANNELS, sinks, RECENT)
        keep_sums(attention, scores, compaction, sinks, RECENT, new_attention)
        keep_sums(positions, scores, compaction, sinks, RECENT, new_positions)
        places = torch.arange(kept)
        blocks = torch.tensor(table)[places // BLOCK]
        assert torch.equal(positions[blocks, :, places % BLOCK, 0].T.long(), held)
        for head in range(KV_HEADS):
            assert torch.equal(v_cache[blocks, head, places % BLOCK], v[held[head], head])
        done = end


def test_scores_of_spread_keys_are_those_of_the_keys_themselves() -> None:
    """Of keys that rotate_heads has spread, with queries that it has spread too."""
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn(8, KV_HEADS, BLOCK, CHANNELS, generator=generator) for _ in range(2))
    q = torch.randn(4, KV_HEADS * GROUP, BLOCK, CHANNELS, generator=generator)
    numbers = torch.zeros(8, KV_HEADS, BLOCK, 1)
    compaction = torch.tensor([64, 32, 32, 64, 0, *range(8), *range(4), *range(32)]).int()
    inv_freq, found = torch.tensor([1.0, 0.1]), []
    for is_spread in (False, True):
        spread = rotated if is_spread else torch.clone
        halves = spread(q).transpose(1, 2).reshape(4, BLOCK, 2 * KV_HEADS * GROUP, CHANNELS // 2).transpose(1, 2)
        queries = halves[:, : KV_HEADS * GROUP], halves[:, KV_HEADS * GROUP :]
        read = (*queries, spread(k), v, numbers, numbers, compaction, gaussian_sketch(CHANNELS))
        found.append(score_leverage(*read, inv_freq, False, is_spread, SCALE, 20.0, 0, 1, CHANNELS, LONGEST)[0])
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_no_compaction_scores_nothing() -> None:
    k = torch.randn(3, KV_HEADS, BLOCK, CHANNELS)
    numbers, q = torch.zeros(3, KV_HEADS, BLOCK, 1), torch.zeros(3, KV_HEADS * GROUP, BLOCK, CHANNELS // 2)
    none = torch.zeros(0, dtype=torch.int32)
    read = (q, q, k, k, numbers, numbers, none, gaussian_sketch(CHANNELS))
    found = score_leverage(*read, None, False, False, SCALE, None, 0, 1, CHANNELS, LONGEST)
    assert all(each.shape == (1, KV_HEADS * LONGEST) and not each.any() for each in found)
