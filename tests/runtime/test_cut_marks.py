"""Digests of blocks behind rows that have left: of the tokens, the policy and the cuts until there."""

from __future__ import annotations

import pytest

from llmc.program import CachePolicy, Nearest, SnapKV, Streaming, Stride
from llmc.runtime.prefix_cache.block_digests import BlockDigests

BLOCK = 8
TOKENS = list(range(201))
STREAMING = Streaming(budget=48, sinks=3, every=16)
STRIDE = Stride(step=2, recent=32, rows=16)
SNAPKV = SnapKV(budget=48, window=16, every=16).fitted(BLOCK)


def digests(built: CachePolicy, policy: CachePolicy | None = None, prompt: int = len(TOKENS)) -> list[bytes]:
    found = BlockDigests(BLOCK, [Nearest(window=24), built])
    return found.of_prompt(TOKENS, b"", found.marks(policy, prompt))


def common(one: list[bytes], other: list[bytes]) -> int:
    """Number of first blocks with the same digests."""
    return sum(first == second for first, second in zip(one, other, strict=True))


PLAIN = BlockDigests(BLOCK).of_prompt(TOKENS, b"")


@pytest.mark.parametrize("policy", [STREAMING, STRIDE])
def test_blocks_behind_the_first_cut_have_digests_of_their_own(policy: CachePolicy) -> None:
    first = next(policy.cuts(len(TOKENS)))
    assert digests(policy)[: first // BLOCK] == PLAIN[: first // BLOCK]
    assert common(digests(policy), PLAIN) == first // BLOCK
    assert digests(policy) == digests(policy, policy), "a request may name what the engine was built for"


def test_other_options_have_other_digests() -> None:
    other = Stride(step=2, recent=32, rows=16, sinks=8)
    first = min(next(each.cuts(len(TOKENS))) for each in (STRIDE, other))
    assert common(digests(STRIDE), digests(STRIDE, other)) == first // BLOCK


def test_cuts_that_depend_on_the_prompt_tell_prompts_apart() -> None:
    """Both have read their prompts whole, so the first one's rows leave at token 104, the second's later."""
    assert common(digests(SNAPKV, prompt=100), digests(SNAPKV, prompt=160)) == 104 // BLOCK
    assert common(digests(SNAPKV, prompt=160), PLAIN) == 160 // BLOCK
    assert digests(SNAPKV, prompt=100) == digests(SNAPKV, prompt=104)


def test_what_keeps_every_row_has_the_plain_digests() -> None:
    assert digests(STRIDE, CachePolicy()) == digests(Nearest(window=16)) == PLAIN
