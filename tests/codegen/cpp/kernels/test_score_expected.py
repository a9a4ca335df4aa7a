"""score_expected, in every format of a cache, against the op's reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.formats.cache_format import parse_cache_format
from llmc.ops.score_expected import score_expected
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer
from tests.codegen.cpp.kernels.test_row_choices import BLOCK, FORMATS, KEYS, KV_HEADS, LONGEST, cached, targets

INV_FREQ = torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01])


def checked(
    target: CpuTarget,
    format: str | None,
    *,
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    rows: int = 43,
    tokens: int = 90,
    pinned: int = 0,
    sinks: int = 2,
    recent: int = 3,
    inv_freq: Tensor = INV_FREQ,
    interleaved: bool = False,
    is_spread: bool = False,
) -> Tensor:
    """Run the kernel and compare what it gives with the reference; returns the scores."""
    k, _, compaction, _ = cached(format, rows, 24, 0, dtype, tokens=tokens, pinned=pinned)
    half = len(inv_freq)
    means = torch.randn(heads, KEYS + half, generator=torch.Generator().manual_seed(heads))
    turned = (inv_freq, interleaved, is_spread)
    expected = score_expected(k, compaction, means, *turned, sinks, recent, LONGEST, format)
    parsed = None if format is None else parse_cache_format(format)
    weights, of_heads, found = torch.empty_like(means), torch.empty(heads, LONGEST), torch.empty(1, KV_HEADS * LONGEST)
    values = {
        "heads": heads,
        "kv_heads": KV_HEADS,
        "block_size": BLOCK,
        "channels": KEYS,
        "half": half,
        "k_cache": pointer(k),
        "compaction": pointer(compaction),
        "means": pointer(means),
        "inv_freq": pointer(inv_freq),
        "interleaved": interleaved,
        "is_spread": is_spread,
        "sinks": sinks,
        "recent": recent,
        "longest": LONGEST,
        "cache_group": 0 if parsed is None else parsed.group or 0,
        "weights": pointer(weights),
        "expected": pointer(of_heads),
        "scores": pointer(found),
    }
    call(target, "score_expected", [k.dtype if parsed is None else parsed.codes], values)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    return found.view(KV_HEADS, LONGEST)


@targets
@pytest.mark.parametrize("format", FORMATS)
def test_scores_are_the_reference_s(target: CpuTarget, format: str | None) -> None:
    assert checked(target, format).any()


@targets
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"interleaved": True},
        {"is_spread": True},
        {"inv_freq": torch.rand(KEYS // 2)},
        {"heads": 3},
        {"heads": 51, "rows": 64},
        {"tokens": 100_000},
        {"rows": 40, "sinks": 17, "recent": 0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_any_rotation_and_any_rows(target: CpuTarget, options: dict[str, Any]) -> None:
    assert checked(target, None if "dtype" in options else "int8:g8", **options).any()


@targets
def test_pinned_rows_win(target: CpuTarget) -> None:
    found = checked(target, None, pinned=13)
    assert found[:, :13].isinf().all() and not found[:, 13:].isinf().any() and found[:, 13:40].any()
    found = checked(target, None, pinned=40)
    assert found[:, :40].isinf().all() and not found[:, 40:].any()
