"""When tables are cut by triattention, and what stays."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from llmc.program import CachePolicy, ChoosingHeads, Cut, TriAttention

PINNED = TriAttention(budget=16, every=16, recent=4, block=8)
COUNTED = TriAttention(budget=48, every=16, recent=4, pinned=0, block=8)


def cuts(policy: TriAttention, prompt: int) -> list[tuple[int, Cut]]:
    return list(islice(policy.all_cuts(prompt), 3))


def test_the_prompt_stays_in_addition_to_the_budget() -> None:
    """100 rows and 16 more are whole blocks of 8 at 120; the first multiple of 16 tokens beyond that is 128."""
    found = cuts(PINNED, 100)
    assert [end for end, _ in found] == [128, 144, 160]
    assert [cut.leaving for _, cut in found] == [(range(120, 128),), (range(120, 136),), (range(120, 136),)]
    assert all(cut.chosen == 120 and cut.pinned == 100 for _, cut in found)


@pytest.mark.parametrize(("prompt", "ends"), [(100, [112, 128, 144]), (96, [96, 112, 128]), (10, [64, 80, 96])])
def test_a_counted_prompt_is_cut_behind_its_end(prompt: int, ends: list[int]) -> None:
    found = cuts(COUNTED, prompt)
    assert [end for end, _ in found] == ends
    assert all(cut.chosen == 48 and not cut.pinned for _, cut in found)
    assert [cut.dropped for _, cut in found] == [ends[0] - 48, 16, 16]


def test_it_is_named_by_its_options() -> None:
    text = "triattention:budget=64,every=32,sinks=0,block=8,recent=16,pinned=0,heads=kv_head"
    assert str(CachePolicy.from_text(text)) == text
    assert CachePolicy.from_text("triattention:budget=64") == TriAttention(budget=64)
    for heads in ChoosingHeads:
        policy = CachePolicy.from_text(f"triattention:budget=64,heads={heads}")
        assert policy == TriAttention(budget=64, heads=heads)
        assert policy.joins_layers == (heads in ("all", "kv_head"))


@pytest.mark.parametrize("word", ["", "every", "3", "ALL"])
def test_heads_are_words(word: str) -> None:
    problem = f"'heads={word}' is not one of heads=all, heads=kv_head, heads=layer_kv_head"
    with pytest.raises(ValueError, match=re.escape(problem)):
        CachePolicy.from_text(f"triattention:budget=64,heads={word}")


def test_requests_choose_what_is_no_part_of_the_graph() -> None:
    assert PINNED.runs(TriAttention(budget=64, every=8, recent=4, pinned=0))
    others: tuple[dict[str, Any], ...] = ({"recent": 8}, {"sinks": 1}, {"heads": ChoosingHeads.ALL})
    for other in others:
        assert not PINNED.runs(replace(PINNED, **other))
