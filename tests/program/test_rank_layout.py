"""What each rank of an engine is."""

from __future__ import annotations

from llmc.program import RankLayout


def test_ranks_of_a_stage_follow_each_other() -> None:
    layout = RankLayout(tensor=2, pipeline=3)
    assert layout.ranks == 6
    assert [layout.stage_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [layout.tensor_rank_of(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert all(layout.rank_of(layout.stage_of(r), layout.tensor_rank_of(r)) == r for r in range(6))


def test_one_rank_without_a_choice() -> None:
    assert RankLayout().ranks == 1
