"""score_expected against TriAttention as it was published, and the rows that stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.ops.compact_kv import compact_kv
from llmc.ops.kv_write import write_slots
from llmc.ops.rope import rotate
from llmc.ops.rotate_heads import rotated
from llmc.ops.score_expected import means_of, pairs, score_expected

BLOCK, KV_HEADS, GROUP, CHANNELS = 8, 2, 3, 16
LONGEST, BLOCKS = 128, 24
INV_FREQ = torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003])


def complex_pairs(x: Tensor, half: int, interleaved: bool) -> Tensor:
    """The rotated channels as complex numbers, [..., half], fp64."""
    return torch.complex(*(each.double().contiguous() for each in pairs(x, half, interleaved)))


def published(queries: Tensor, plain: Tensor, *args: Any, **options: Any) -> Tensor:
    """Scores of keys by KV head, [kv_heads, keys], as the authors' code computes them with `per_layer_perhead_pruning`.

    The arguments are those of published_by_head.
    """
    scores = published_by_head(queries, plain, *args, **options)
    return scores.view(plain.shape[1], -1, scores.shape[1]).amax(1)


def published_by_head(
    queries: Tensor,
    plain: Tensor,
    positions: Tensor,
    now: int,
    inv_freq: Tensor,
    *,
    scale: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    """TriAttention's scores of keys by query head, [heads, keys], as its authors' code computes them.

    With `normalize_scores` and the mean over distances. Keys are turned back by their positions, and the difference of
    positions enters the phase.

    Args:
        queries: Of the calibration text before their rotation, [tokens, heads, channels].
        plain: Keys before their rotation, [keys, kv_heads, channels].
        positions: Of the keys, [kv_heads, keys].
        now: Number of tokens that the model has read.
        scale: Of the rotation, of which upstream multiplies scores with the square.
    """
    half, group = len(inv_freq), queries.shape[1] // plain.shape[1]
    q = complex_pairs(queries, half, interleaved)
    mean, sizes = q.mean(0), q.abs().mean(0)
    offsets = torch.tensor([float(2**power) for power in range(17)], dtype=torch.float64)
    found = list[Tensor]()
    for head in range(queries.shape[1]):
        k = complex_pairs(plain[:, head // group], half, interleaved)
        relative = mean[head] * k.conj()
        ahead = now - positions[head // group].double()[:, None] + offsets
        phase = ahead[:, :, None] * inv_freq.double() + relative.angle()[:, None]
        by_distance = (relative.abs()[:, None] * phase.cos() * scale**2).sum(2)
        spread = ((sizes[head] - mean[head].abs()) * k.abs() * scale**2).sum(1)
        rest = slice(2 * half, None)  # No published model has channels that are not rotated.
        unturned = plain[:, head // group, rest].double() @ queries[:, head, rest].double().mean(0)
        found.append((by_distance + spread[:, None] + unturned[:, None]).mean(1))
    scores = torch.stack(found)
    return (scores - scores.mean(1, keepdim=True)) / scores.std(1, unbiased=False, keepdim=True).clamp_min(1e-6)


def means(queries: Tensor, half: int, *, scale: float = 1.0, interleaved: bool = False) -> Tensor:
    total, sizes = queries.double().sum(0), complex_pairs(queries, half, interleaved).abs().sum(0)
    return means_of(total, sizes, len(queries), scale, interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("half", "scale"), [(8, 1.0), (8, 1.3), (5, 1.0), (5, 0.7)])
@pytest.mark.parametrize("pinned", [0, 21], ids=["counted", "pinned"])
def test_rows_that_stay_are_those_of_the_published_algorithm(
    half: int, scale: float, interleaved: bool, pinned: int
) -> None:
    """Cut three times. Keys that stay keep their rotation: their positions, which only the reference knows, cancel."""
    generator = torch.Generator().manual_seed(half)
    count, budget, sinks, recent = 120, 48, 2, 3
    queries = torch.randn(200, KV_HEADS * GROUP, CHANNELS, generator=generator)
    queries += torch.randn(KV_HEADS * GROUP, CHANNELS, generator=generator)
    plain = torch.randn(count, KV_HEADS, CHANNELS, generator=generator)
    inv_freq = INV_FREQ[:half]
    angles = torch.arange(count)[:, None] * inv_freq
    k = rotate(plain, angles.cos() * scale, angles.sin() * scale, interleaved)
    v = torch.arange(count).float()[:, None, None].expand(count, KV_HEADS, CHANNELS)
    k_cache, v_cache = (torch.zeros(BLOCKS, KV_HEADS, BLOCK, CHANNELS) for _ in range(2))
    table = torch.randperm(BLOCKS, generator=generator).tolist()
    table_of_means = means(queries, half, scale=scale, interleaved=interleaved)
    held, done = torch.zeros(KV_HEADS, 0, dtype=torch.int64), 0
    for end in (88, 104, 120):
        before = held.shape[1]
        held = torch.cat((held, torch.arange(done, end).expand(KV_HEADS, -1)), dim=1)
        rows = held.shape[1]
        slots = torch.tensor([table[row // BLOCK] * BLOCK + row % BLOCK for row in range(before, rows)])
        write_slots(k[done:end], k_cache, slots)
        write_slots(v[done:end], v_cache, slots)
        numbers = [rows, budget, 0, end, pinned, *table[: -(-rows // BLOCK)], *table[: budget // BLOCK]]
        compaction = torch.tensor(numbers).int()
        turned = (inv_freq, interleaved, False)
        scores = score_expected(k_cache, compaction, table_of_means, *turned, sinks, recent, LONGEST)
        free = slice(max(sinks, pinned), rows - recent)
        expected = torch.full((KV_HEADS, rows), float("inf"), dtype=torch.float64)
        for head in range(KV_HEADS):
            own = held[head, free]
            of_head = slice(head * GROUP, (head + 1) * GROUP)
            read = (queries[:, of_head], plain[own, head : head + 1], own[None], end, inv_freq)
            expected[head, free] = published(*read, scale=scale, interleaved=interleaved)[0]
        torch.testing.assert_close(scores.view(KV_HEADS, -1)[:, free].double(), expected[:, free], atol=2e-4, rtol=2e-4)
        compact_kv(k_cache, v_cache, scores, compaction, CHANNELS, CHANNELS, sinks, recent)
        held = held.gather(1, expected.topk(budget).indices.sort(-1).values)
        places = torch.arange(budget)
        blocks = torch.tensor(table)[places // BLOCK]
        for head in range(KV_HEADS):
            assert v_cache[blocks, head, places % BLOCK, 0].tolist() == held[head].tolist()
        assert held[:, :pinned].tolist() == [list(range(pinned))] * KV_HEADS
        done = end


def request(**changes: int) -> Tensor:
    header = {"rows": 64, "kept": 32, "queries": 0, "tokens": 64, "pinned": 0} | changes
    return torch.tensor([*header.values(), *range(8), *range(4)]).int()


def test_the_position_is_that_of_the_sequence_and_not_the_number_of_rows() -> None:
    """After cuts there are fewer rows than tokens: scores are those of the sequence's position."""
    generator = torch.Generator().manual_seed(3)
    queries = 3 + torch.randn(50, KV_HEADS * GROUP, CHANNELS, generator=generator)
    plain = torch.randn(64, KV_HEADS, CHANNELS, generator=generator)
    positions = torch.cat((torch.arange(20), torch.arange(400, 444)))
    angles = positions[:, None] * INV_FREQ
    k_cache = torch.zeros(8, KV_HEADS, BLOCK, CHANNELS)
    write_slots(rotate(plain, angles.cos(), angles.sin(), False), k_cache, torch.arange(64))
    found = [
        score_expected(k_cache, request(tokens=tokens), means(queries, 8), INV_FREQ, False, False, 0, 0, LONGEST)
        for tokens in (444, 64)
    ]
    of_sequence, of_rows = (each.view(KV_HEADS, -1)[:, :64].double() for each in found)
    right = published(queries, plain, positions.expand(KV_HEADS, -1), 444, INV_FREQ)
    torch.testing.assert_close(of_sequence, right, atol=2e-4, rtol=2e-4)
    assert (of_rows - right).abs().max() > 0.1


def test_scores_of_spread_keys_are_those_of_the_keys_themselves() -> None:
    generator = torch.Generator().manual_seed(5)
    k = torch.randn(8, KV_HEADS, BLOCK, CHANNELS, generator=generator)
    queries = 1 + torch.randn(50, KV_HEADS * GROUP, CHANNELS, generator=generator)
    plain, spread = (
        score_expected(keys, request(), means(queries, 8), INV_FREQ, False, is_spread, 0, 1, LONGEST)
        for keys, is_spread in ((k, False), (rotated(k), True))
    )
    torch.testing.assert_close(plain, spread, atol=1e-4, rtol=1e-4)


def test_equal_keys_tie_and_the_first_stay() -> None:
    """Deviations are never 0, and scores of equal keys have the same bits."""
    k = torch.ones(8, KV_HEADS, BLOCK, CHANNELS)
    v = torch.arange(64.0).view(8, 1, BLOCK, 1).expand(8, KV_HEADS, BLOCK, CHANNELS).contiguous()
    queries = torch.randn(50, KV_HEADS * GROUP, CHANNELS, generator=torch.Generator().manual_seed(1))
    scores = score_expected(k, request(), means(queries, 8), INV_FREQ, False, False, 0, 2, LONGEST)
    compact_kv(k, v, scores, request(), CHANNELS, CHANNELS, 0, 2)
    assert v[:4, 0, :, 0].flatten().tolist() == [*range(30), 62, 63]


def test_no_compaction_scores_nothing() -> None:
    k, none = torch.randn(3, KV_HEADS, BLOCK, CHANNELS), torch.zeros(0, dtype=torch.int32)
    table = torch.ones(KV_HEADS * GROUP, CHANNELS + 8)
    found = score_expected(k, none, table, INV_FREQ, False, False, 0, 1, LONGEST)
    assert found.shape == (1, KV_HEADS * LONGEST) and not found.any()
