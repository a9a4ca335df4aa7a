"""What lies where in the memory of ranks: nothing on anything else, and nothing left over."""

from __future__ import annotations

from llmc.program import RankLayout
from llmc.runtime.ranks.rank_memory import MemoryLayout


def test_each_part_begins_where_the_one_before_ends() -> None:
    layout = MemoryLayout(RankLayout(2, 3), exchange=4096, step=640, widths=(48, 20), tokens=7, logits=(5, 33))
    widths = [4 * 7 * 48, 4 * 7 * 20]  # Of 64 bytes each.
    rows = [-(-width // 64) * 64 for width in widths]
    at = 3 * 4096 + 6 * 64
    for number in range(3):
        assert layout.begin(number) == at
        at += 640
        for stage, size in enumerate(rows, start=1):
            for rank in range(2):
                assert layout.rows(number, stage, rank) == (at, size)
                at += size
        at += -(-4 * 5 * 33 // 64) * 64
    assert layout.nbytes == at
    assert layout.begin(3) == layout.begin(0)
