"""score_keys and compact_kv, in every format of a cache, against the ops' references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmc.formats.cache_format import parse_cache_format
from llmc.ops.cache_codes import read_codes
from llmc.ops.compact_kv import compact_kv
from llmc.ops.kv_write import kv_write
from llmc.ops.last_uses import last_uses
from llmc.ops.peak_attention import peak_attention
from llmc.ops.score_keys import score_keys
from llmc.ops.sum_attention import keep_sums, sum_attention
from llmc.ops.turn_rows import turn_rows
from llmc.program import COMPACTION_HEADER
from llmc.program.program import CacheSlot
from llmc.program.slot_views import cache_views
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer
from tests.codegen.cpp.runnable_targets import CODED

targets = pytest.mark.parametrize("target", CODED)
FORMATS = [None, "int8", "int8:g8", "fp8", "int4:head", "int4:g8"]
BLOCK, LONGEST, KV_HEADS, KEYS, VALUES = 8, 64, 3, 16, 32
# An op, the numbers of rows and of queries, and of tokens. A second reading has more rows than the request has tokens,
# and none when it begins.
UPDATES = [
    (sum_attention, (43, 5), 90),
    (last_uses, (48, BLOCK), 90),
    (peak_attention, (43, 5), 32),
    (peak_attention, (24, 0), 24),
]


def cached(
    format: str | None,
    rows: int,
    kept: int,
    queries: int = 5,
    dtype: torch.dtype = torch.float32,
    *,
    tokens: int = 90,
    pinned: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Caches of one request, its compaction, and scores with ties. One of the places is the block of the same rows."""
    generator = torch.Generator().manual_seed(rows)
    count = 2 * LONGEST // BLOCK
    widths = (
        (KEYS, VALUES) if format is None else [parse_cache_format(format).position_bytes(n) for n in (KEYS, VALUES)]
    )
    kind = dtype if format is None else torch.uint8
    k, v = (torch.zeros(count, KV_HEADS, BLOCK, width, dtype=kind) for width in widths)
    blocks = torch.randperm(count, generator=generator)
    own, others = blocks[: -(-rows // BLOCK)], blocks[-(-rows // BLOCK) :]
    slots = (own[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:rows].int()
    keys, values = (torch.randn(rows, KV_HEADS, n, generator=generator).to(dtype) for n in (KEYS, VALUES))
    kv_write(keys, values, k, v, slots, format)
    places = torch.cat((own[:1], others[: -(-kept // BLOCK) - 1]))
    numbers = torch.tensor([rows, kept, queries, tokens, pinned])
    compaction = torch.cat((numbers, own, places, torch.arange(queries) + 3)).int()
    scores = torch.randint(-3, 4, (1, KV_HEADS * LONGEST), generator=generator) / 7
    return k, v, compaction, scores


def row_bytes(cache: Tensor, block: int, head: int, row: int, width: int, format: str | None) -> Tensor:
    """What is stored of one row of a head."""
    slot = CacheSlot(KV_HEADS, width, width, "U8" if format else "F32", format)
    views = cache_views(slot, "k", cache.view(torch.uint8), BLOCK)
    return torch.cat([view[block, head, :, row].flatten() for view in views])


@targets
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_scores_are_the_reference_s(target: CpuTarget, dtype: torch.dtype, format: str | None) -> None:
    k, _, compaction, _ = cached(format, rows=43, kept=24, dtype=dtype)
    queries = torch.randn(2, 4, 6, BLOCK, KEYS // 2).to(dtype)
    options = 0.3, 5, 20.0, LONGEST, format
    expected = score_keys(queries[0], queries[1], k, compaction, *options)
    sums, scores = torch.empty(KV_HEADS, LONGEST), torch.empty(1, KV_HEADS * LONGEST)
    parsed = None if format is None else parse_cache_format(format)
    values = {
        "heads": 6,
        "kv_heads": KV_HEADS,
        "block_size": BLOCK,
        "half": KEYS // 2,
        "q_first": pointer(queries[0]),
        "q_second": pointer(queries[1]),
        "k_cache": pointer(k),
        "compaction": pointer(compaction),
        "scale": 0.3,
        "pool": 5,
        "softcap": 20.0,
        "longest": LONGEST,
        "cache_group": 0 if parsed is None else parsed.group or 0,
        "sums": pointer(sums),
        "scores": pointer(scores),
    }
    call(target, "score_keys", [dtype, k.dtype if parsed is None else parsed.codes], values)
    torch.testing.assert_close(scores, expected)


@targets
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "kept"), [(43, 24), (16, 8), (64, 56)])
def test_rows_are_the_reference_s(target: CpuTarget, format: str | None, rows: int, kept: int) -> None:
    k, v, compaction, scores = cached(format, rows, kept)
    expected = k.clone(), v.clone()
    compact_kv(*expected, scores, compaction, KEYS, VALUES, 2, 3, format)
    parsed = None if format is None else parse_cache_format(format)
    codes = [4 * n if parsed is None else parsed.code_bytes(n) for n in (KEYS, VALUES)]
    whole = [4 * n if parsed is None else parsed.position_bytes(n) for n in (KEYS, VALUES)]
    values = {
        "kv_heads": KV_HEADS,
        "block_size": BLOCK,
        "longest": LONGEST,
        "k_cache": pointer(k),
        "v_cache": pointer(v),
        "key_bytes": codes[0],
        "value_bytes": codes[1],
        "key_scales": (whole[0] - codes[0]) // 2,
        "value_scales": (whole[1] - codes[1]) // 2,
        "scores": pointer(scores),
        "compaction": pointer(compaction),
        "sinks": 2,
        "recent": 3,
    }
    call(target, "compact_kv", [], values)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


@targets
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_turned_rows_are_the_reference_s(target: CpuTarget, format: str | None, interleaved: bool) -> None:
    k, v, compaction, _ = cached(format, rows=48, kept=24, queries=0)
    expected = k.clone(), v.clone()
    inv_freq = torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01])
    turn_rows(*expected, compaction, inv_freq, interleaved, 3, KEYS, VALUES, format)
    parsed = None if format is None else parse_cache_format(format)
    codes = [4 * n if parsed is None else parsed.code_bytes(n) for n in (KEYS, VALUES)]
    whole = [4 * n if parsed is None else parsed.position_bytes(n) for n in (KEYS, VALUES)]
    values = {
        "kv_heads": KV_HEADS,
        "block_size": BLOCK,
        "head_dim": KEYS,
        "half": len(inv_freq),
        "interleaved": interleaved,
        "k_cache": pointer(k),
        "v_cache": pointer(v),
        "key_bytes": codes[0],
        "value_bytes": codes[1],
        "key_scales": (whole[0] - codes[0]) // 2,
        "value_scales": (whole[1] - codes[1]) // 2,
        "compaction": pointer(compaction),
        "inv_freq": pointer(inv_freq),
        "sinks": 3,
        "cache_group": 0 if parsed is None else parsed.group or 0,
    }
    call(target, "turn_rows", [k.dtype if parsed is None else parsed.codes], values)
    assert torch.equal(v, expected[1])
    if parsed is None:
        torch.testing.assert_close(k, expected[0])
        return
    places = compaction[COMPACTION_HEADER + 6 :].long()
    found, right = (read_codes(cache[places], KEYS, str(parsed)) for cache in (k, expected[0]))
    # A product that is rounded the other way may end in the next code.
    largest = right.abs().amax(-1, keepdim=True)
    assert ((found - right).abs() <= largest / (4 if parsed.codes == "int4" else 14)).all()
    assert (found != right).float().mean() < 0.01


@targets
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("update", "sizes", "tokens"), UPDATES, ids=lambda each: getattr(each, "__name__", None))
def test_updates_are_the_reference_s(
    target: CpuTarget,
    update: Callable[..., Tensor],
    sizes: tuple[int, int],
    tokens: int,
    dtype: torch.dtype,
    format: str | None,
) -> None:
    rows, queries_count = sizes
    k, _, compaction, scores = cached(format, rows=rows, kept=24, queries=queries_count, dtype=dtype, tokens=tokens)
    queries = torch.randn(2, 4, 6, BLOCK, KEYS // 2).to(dtype)
    largest = 0.1 if update is peak_attention else 5
    sums = torch.rand(k.shape[0], KV_HEADS, 1, 1).mul(largest).expand(-1, -1, BLOCK, -1).contiguous()
    expected = update(queries[0], queries[1], k, sums, compaction, 0.3, 20.0, LONGEST, format)
    parsed, found = None if format is None else parse_cache_format(format), torch.empty(1, KV_HEADS * LONGEST)
    values = {
        "heads": 6,
        "kv_heads": KV_HEADS,
        "block_size": BLOCK,
        "half": KEYS // 2,
        "q_first": pointer(queries[0]),
        "q_second": pointer(queries[1]),
        "k_cache": pointer(k),
        "sums": pointer(sums),
        "compaction": pointer(compaction),
        "scale": 0.3,
        "softcap": 20.0,
        "longest": LONGEST,
        "cache_group": 0 if parsed is None else parsed.group or 0,
        "scores": pointer(found),
    }
    call(target, update.__name__, [dtype, k.dtype if parsed is None else parsed.codes], values)
    torch.testing.assert_close(found, expected)
    before = sums.clone()
    keep_sums(before, scores, compaction, 2, 3)
    values = {
        "kv_heads": KV_HEADS,
        "block_size": BLOCK,
        "longest": LONGEST,
        "sums": pointer(sums),
        "scores": pointer(scores),
        "compaction": pointer(compaction),
        "kept_first": 2,
        "kept_last": 3,
    }
    call(target, "keep_sums", [], values)
    assert torch.equal(sums, before)
    keep_sums(before, scores, compaction, 2, 3, found)
    call(target, "keep_sums", [], values | {"numbers": pointer(found)})
    assert torch.equal(sums, before)
