"""Simulated forms of a KV cache: those that keep all rows exact change nothing, and finer ones lose less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kv_code_quality import attention
from benchmarks.kv_code_roundings import CANDIDATES, TILE, Candidate, exact, of_llmc, ranged, variance_normalized
from benchmarks.special_prefix import special_prefix
from tests.seeded_normal import seeded_normal

Q, K, V = seeded_normal(0, 4, 300, 64), seeded_normal(1, 2, 300, 64), seeded_normal(2, 2, 300, 64)
PLAIN = scaled_dot_product_attention(Q[None], K[None], V[None], is_causal=True, scale=0.1, enable_gqa=True)[0]


def _out(candidate: Candidate) -> torch.Tensor:
    return attention(candidate, Q, K, V, K.mean(1, keepdim=True), 0.1)


@pytest.mark.parametrize(
    "options", [{}, {"centered": True}, {"recent": 300}, {"first": 300}, {"tile": 512}], ids=lambda each: str(each)
)
def test_exact_rows_leave_attention_as_it_is(options: dict[str, Any]) -> None:
    """A constant that is subtracted from all keys changes nothing."""
    rounding = exact if not options or "centered" in options else torch.zeros_like
    torch.testing.assert_close(_out(Candidate("exact", rounding, rounding, 256, 256, **options)), PLAIN)


def test_rows_of_a_complete_tile_are_codes() -> None:
    out = _out(Candidate("tiles", torch.zeros_like, torch.zeros_like, 0, 0, tile=TILE))
    torch.testing.assert_close(out[:, : TILE - 1], PLAIN[:, : TILE - 1])
    assert (out[:, TILE - 1] == 0).all() and (out[:, TILE:] != PLAIN[:, TILE:]).all()


@pytest.mark.parametrize(
    ("finer", "coarser"),
    [
        (of_llmc("int8:rotated"), of_llmc("int4:rotated")),
        (ranged(4, 32, search=True), ranged(4, 32)),
        (ranged(5), ranged(4)),
        (variance_normalized(4, by_channel=True), variance_normalized(3, by_channel=True)),
        (variance_normalized(3, by_channel=False), variance_normalized(2, by_channel=False)),
    ],
)
def test_finer_roundings_lose_less(finer: object, coarser: object) -> None:
    assert callable(finer) and callable(coarser)
    small, large = ((rounding(K) - K).square().sum() for rounding in (finer, coarser))
    assert 0 < small < large


def test_llmc_rounds_by_ranges_of_groups() -> None:
    torch.testing.assert_close(of_llmc("int4:rotated")(K), ranged(4, 32)(K), atol=1e-5, rtol=0)


def test_candidates_are_named_once() -> None:
    assert all(name == each.name for name, each in CANDIDATES.items()) and len(CANDIDATES) > 20


def test_special_tokens_behind_a_text_begin_no_window() -> None:
    fast = Tokenizer(WordLevel({"a": 0, "<bos>": 1, "<eos>": 2}, unk_token="a"))
    fast.post_processor = TemplateProcessing("<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    assert special_prefix(fast) == [1]
    fast.post_processor = TemplateProcessing("$A <eos>", special_tokens=[("<eos>", 2)])
    assert special_prefix(fast) == []
