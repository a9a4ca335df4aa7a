"""score_leverage, in every format of a cache, against the op's reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.formats.cache_format import parse_cache_format
from llmc.ops.score_leverage import gaussian_sketch, score_leverage
from llmc.program import COMPACTION_HEADER
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer
from tests.codegen.cpp.kernels.test_row_choices import BLOCK, FORMATS, KEYS, KV_HEADS, LONGEST, VALUES, cached, targets

SCALE, SOFTCAP = 0.3, 20.0
INV_FREQ = torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01])


def checked(
    target: CpuTarget,
    dtype: torch.dtype,
    format: str | None,
    *,
    heads: int = 6,
    rows: int = 43,
    kept: int = 24,
    queries: int = 13,
    sinks: int = 2,
    recent: int = 3,
    inv_freq: Tensor | None = INV_FREQ,
    interleaved: bool = False,
    is_spread: bool = False,
) -> Tensor:
    """Run the kernel and compare what it gives with the reference; returns the scores."""
    k, v, compaction, _ = cached(format, rows, kept, queries, dtype)
    q = torch.randn(2, 8, heads, BLOCK, KEYS // 2).to(dtype)
    attention = torch.rand(k.shape[0], KV_HEADS, BLOCK, 1)
    positions = torch.zeros_like(attention)
    held = torch.arange(rows - queries) + 5 * (torch.arange(rows - queries) > 20)  # As where a cut took five rows.
    for row, position in enumerate(held.tolist()):
        positions[int(compaction[COMPACTION_HEADER + row // BLOCK]), :, row % BLOCK] = position
    parsed, turning = None if format is None else parse_cache_format(format), 0 if inv_freq is None else len(inv_freq)
    sketch, turned = gaussian_sketch(KEYS), (inv_freq, interleaved, is_spread)
    read = (q[0], q[1], k, v, attention, positions, compaction, sketch)
    expected = score_leverage(*read, *turned, SCALE, SOFTCAP, sinks, recent, VALUES, LONGEST, format)
    angles, pooled = torch.empty(LONGEST, 2, turning), torch.empty(KV_HEADS, LONGEST)
    found = [torch.full((1, KV_HEADS * LONGEST), 7.0) for _ in range(3)]
    values = {
        "heads": heads,
        "kv_heads": KV_HEADS,
        "block_size": BLOCK,
        "half": KEYS // 2,
        "value_dim": VALUES,
        "turning": turning,
        "q_first": pointer(q[0]),
        "q_second": pointer(q[1]),
        "k_cache": pointer(k),
        "v_cache": pointer(v),
        "attention": pointer(attention),
        "positions": pointer(positions),
        "compaction": pointer(compaction),
        "sketch": pointer(sketch),
        "inv_freq": pointer(inv_freq),
        "interleaved": interleaved,
        "is_spread": is_spread,
        "scale": SCALE,
        "softcap": SOFTCAP,
        "sinks": sinks,
        "recent": recent,
        "longest": LONGEST,
        "cache_group": 0 if parsed is None else parsed.group or 0,
        "angles": pointer(angles),
        "pooled": pointer(pooled),
        "scores": pointer(found[0]),
        "new_attention": pointer(found[1]),
        "new_positions": pointer(found[2]),
    }
    call(target, "score_leverage", [dtype, k.dtype if parsed is None else parsed.codes], values)
    for each, right in zip(found, expected, strict=True):
        torch.testing.assert_close(each, right, atol=2e-4, rtol=2e-4)
    return found[0]


@targets
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_scores_are_the_reference_s(target: CpuTarget, dtype: torch.dtype, format: str | None) -> None:
    assert checked(target, dtype, format).any()


@targets
@pytest.mark.parametrize(
    "options",
    [
        {"interleaved": True},
        {"is_spread": True},
        {"inv_freq": None},
        {"rows": 40, "queries": 40, "sinks": 0, "recent": 1},
        {"rows": 40, "queries": 40, "sinks": 17},
        {"heads": 450, "queries": 32},
        {"rows": 56, "kept": 48, "queries": 16},
    ],
    ids=lambda options: next(iter(options)),
)
def test_any_rotation_and_any_rows(target: CpuTarget, options: dict[str, Any]) -> None:
    assert checked(target, torch.float32, "int8:g8", **options).any()


@targets
def test_a_chunk_after_which_all_rows_stay_has_no_scores(target: CpuTarget) -> None:
    assert not checked(target, torch.float32, None, rows=40, kept=40, queries=16).any()
    assert not checked(target, torch.float32, None, rows=8, kept=8, queries=8, sinks=8).any()
