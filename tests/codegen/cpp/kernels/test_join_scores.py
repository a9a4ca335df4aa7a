"""join_scores, of all heads together or of one KV head of all layers, against the op's reference."""

from __future__ import annotations

import pytest
import torch

from llmc.ops.join_scores import join_scores
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer
from tests.codegen.cpp.runnable_targets import CODED


@pytest.mark.parametrize("target", CODED)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("longest", [1, 61, 5000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "across_heads"),
    [(1, 1, True), (3, 1, True), (3, 5, True), (1, 1, False), (3, 3, False)],
)
def test_joined_scores_are_the_reference_s(
    target: CpuTarget, heads: int, kv_heads: int, across_heads: bool, longest: int, threads: int
) -> None:
    """Of the first layer and of a later one, for one row, some rows and all of them, among them pinned ones."""
    generator = torch.Generator().manual_seed(longest)
    scores = torch.randn(1, heads * longest, generator=generator)
    before = torch.randn(1, (1 if across_heads else heads) * longest, generator=generator)
    for each in (scores, before):
        each.view(-1, longest)[:, : longest // 7] = float("inf")
    for others in (None, before):
        for rows in {1, -(-longest // 2), longest}:
            compaction = torch.tensor([rows, 1, 0, rows, longest // 7]).int()
            expected = join_scores(scores, others, compaction, longest, kv_heads, across_heads)
            found = torch.full_like(expected, float("nan"))
            values = {
                "heads": heads,
                "kv_heads": kv_heads,
                "longest": longest,
                "scores": pointer(scores),
                "before": pointer(others),
                "compaction": pointer(compaction),
                "across_heads": across_heads,
                "joined": pointer(found),
            }
            call(target, "join_scores", [], values, threads=threads)
            assert torch.equal(found, expected)
