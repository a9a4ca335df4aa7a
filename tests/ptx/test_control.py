"""Branches, loops and barriers: threads part, meet again, wait for each other, and return early."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.ptx.errors import PtxError
from llmc.ptx.finding import Check
from tests.ptx.ptx_text import kernel_text, run_text

# Every thread counts up to its own number, block by block; a shuffle behind the loop has the whole warp.
LOOP = """
mov.u32 %r1, %ctaid.x;
add.s32 %r2, %r_tid, %r1;
and.b32 %r2, %r2, MASK;
mov.b32 %r3, 0;
setp.eq.u32 %p1, %r2, 0;
@%p1 bra done;
again:
add.s32 %r3, %r3, 3;
sub.s32 %r2, %r2, 1;
setp.ne.u32 %p2, %r2, 0;
@%p2 bra again;
done:
shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;
sub.s32 %r5, %r4, %r3;
mad.wide.u32 %d1, %r_all, 4, %d_y;
st.global.b32 [%d1], %r5;
"""


@pytest.mark.parametrize(("threads", "blocks"), [(32, 1), (64, 3), (128, 40)])
def test_threads_that_part_in_a_loop_meet_behind_it(threads: int, blocks: int) -> None:
    y = np.zeros(threads * blocks, np.int32)
    text = kernel_text(LOOP.replace("MASK", "7"), ["y"], threads=threads)
    report = run_text(text, {"y": y}, threads=threads, grid=(blocks, 1, 1), unwritten=["y"])
    assert not report.findings
    index = np.arange(threads)[None] + np.arange(blocks)[:, None]
    counted = 3 * (index & 7)
    np.testing.assert_array_equal(y.reshape(blocks, threads), counted[:, np.arange(threads) ^ 1] - counted)


def test_blocks_with_longer_loops_go_on_by_themselves() -> None:
    """The trip count is a block's: most blocks end early, and the others are executed without them."""
    blocks, threads = 64, 128
    text = kernel_text(
        """
        mov.u32 %r1, %ctaid.x;
        setp.gt.u32 %p1, %r1, 60;
        selp.b32 %r2, 200, 2, %p1;
        mov.b32 %r3, 0;
        again:
        add.s32 %r3, %r3, %r_tid;
        bar.sync 0;
        sub.s32 %r2, %r2, 1;
        setp.ne.u32 %p2, %r2, 0;
        @%p2 bra again;
        mad.wide.u32 %d1, %r_all, 4, %d_y;
        st.global.b32 [%d1], %r3;
        """,
        ["y"],
        threads=threads,
    )
    y = np.zeros(blocks * threads, np.int32)
    report = run_text(text, {"y": y}, threads=threads, grid=(blocks, 1, 1), unwritten=["y"])
    assert not report.findings
    trips = np.where(np.arange(blocks) > 60, 200, 2)
    np.testing.assert_array_equal(y.reshape(blocks, threads), trips[:, None] * np.arange(threads))


def test_early_returns_are_not_waited_for() -> None:
    """Of each block a warp returns, of each third block all do."""
    text = kernel_text(
        """
        mov.u32 %r1, %ctaid.x;
        rem.u32 %r2, %r1, 3;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 ret;
        setp.lt.u32 %p2, %r_tid, 32;
        @%p2 ret;
        mad.lo.s32 %r3, %r_tid, 4, %r_smem;
        st.shared.b32 [%r3], %r_all;
        bar.sync 0;
        xor.b32 %r4, %r_tid, 32;
        mad.lo.s32 %r5, %r4, 4, %r_smem;
        ld.shared.b32 %r6, [%r5];
        mad.wide.u32 %d1, %r_all, 4, %d_y;
        st.global.b32 [%d1], %r6;
        """,
        ["y"],
        threads=128,
    )
    text = text.replace("xor.b32 %r4, %r_tid, 32;", "sub.s32 %r4, 159, %r_tid;")
    y = np.full(9 * 128, -1, np.int32)
    assert not run_text(text, {"y": y}, threads=128, grid=(9, 1, 1), shared_bytes=512).findings
    rows = y.reshape(9, 128)
    ends = np.arange(9) % 3 == 0
    assert (rows[ends] == -1).all() and (rows[:, :32] == -1).all()
    np.testing.assert_array_equal(rows[~ends, 32:], (np.flatnonzero(~ends) * 128)[:, None] + np.arange(127, 31, -1))


# Two pairs of warps, each with a barrier of its own; then a producer that arrives and does not wait.
NAMED = """
shr.u32 %r1, %r_tid, 6;
add.s32 %r2, %r1, 1;
mad.lo.s32 %r3, %r_tid, 4, %r_smem;
st.shared.b32 [%r3], %r_tid;
bar.sync %r2, 64;
xor.b32 %r4, %r_tid, 32;
mad.lo.s32 %r5, %r4, 4, %r_smem;
ld.shared.b32 %r6, [%r5];
setp.eq.u32 %p1, %r1, 0;
@%p1 bra first;
st.shared.b32 [%r3+512], %r6;
bar.arrive 5, 128;
bra.uni end;
first:
bar.sync 5, 128;
ld.shared.b32 %r6, [%r3+768];
end:
mad.wide.u32 %d1, %r_tid, 4, %d_y;
st.global.b32 [%d1], %r6;
"""


def test_barriers_with_numbers_and_counts() -> None:
    y = np.zeros(128, np.int32)
    report = run_text(kernel_text(NAMED, ["y"], threads=128), {"y": y}, threads=128, shared_bytes=1024)
    assert not report.findings
    swapped = np.arange(128) ^ 32
    np.testing.assert_array_equal(y, np.concatenate([swapped[64:], swapped[64:]]))


# Every thread goes to the label of its warp's index in a list.
INDEXED = """
table:
.branchtargets third, first, second;
shr.u32 %r1, %r_tid, 5;
mov.b32 %r2, 0;
brx.idx %r1, table;
first:
add.s32 %r2, %r2, 100;
second:
add.s32 %r2, %r2, 10;
third:
add.s32 %r2, %r2, 1;
mad.wide.u32 %d1, %r_tid, 4, %d_y;
st.global.b32 [%d1], %r2;
"""


def test_warps_go_to_the_labels_of_their_indices() -> None:
    y = np.zeros(96, np.int32)
    report = run_text(kernel_text(INDEXED, ["y"], threads=96), {"y": y}, threads=96)
    assert not report.findings
    np.testing.assert_array_equal(y, np.repeat([1, 111, 11], 32))


def test_a_list_with_an_unknown_label_is_refused() -> None:
    text = kernel_text(INDEXED.replace("third, first", "third, nowhere"), ["y"], threads=96)
    with pytest.raises(PtxError, match=r"brx\.idx does not take table there"):
        run_text(text, {"y": np.zeros(96, np.int32)}, threads=96)


def test_an_index_behind_the_end_of_its_list_is_found() -> None:
    y = np.zeros(128, np.int32)
    report = run_text(kernel_text(INDEXED, ["y"], threads=128), {"y": y}, threads=128)
    assert [(finding.check, finding.thread) for finding in report.findings] == [(Check.BOUNDS, 96)]
    assert "the index of the branch is 3; its list has 3 labels" in report.findings[0].detail
    np.testing.assert_array_equal(y, np.repeat([1, 111, 11, 0], 32))


SPECIALISED = """
setp.lt.u32 %p1, %r_tid, 64;
@%p1 bra consume;
PRODUCE
bra.uni end;
consume:
bar.sync 1, 128;
end:
ret;
"""


def test_warps_that_wait_forever_are_named() -> None:
    text = kernel_text(SPECIALISED.replace("PRODUCE", "bar.sync 2, 128;"), threads=128)
    with pytest.raises(PtxError) as caught:
        run_text(text, {}, threads=128, grid=(3, 1, 1))
    assert caught.value.problem == (
        "k waits forever in block 0: threads 64 to 127 at line 20 (bar.sync) for barrier 2, at which 64 of 128 threads "
        "have arrived; threads 0 to 63 at line 23 (bar.sync) for barrier 1, at which 64 of 128 threads have arrived"
    )
    assert caught.value.at == "test.ptx:20"


def test_who_has_returned_is_said() -> None:
    text = kernel_text(SPECIALISED.replace("PRODUCE", ""), threads=128)
    with pytest.raises(PtxError, match="64 of 128 threads have arrived; 64 threads have returned"):
        run_text(text, {}, threads=128)


def test_a_loop_without_an_end_is_told_with_its_line() -> None:
    text = kernel_text('.file 1 "loop.py"\nagain:\n.loc 1 7 3\nadd.s32 %r1, %r1, 1;\nbra.uni again;')
    with pytest.raises(PtxError, match="block 0 has executed 5000 instructions") as caught:
        run_text(text, {}, limit=5000)
    assert caught.value.at is not None and caught.value.at.endswith("(bra.uni), loop.py:7")
    assert caught.value.fix is not None and "LLMC_PTX_INSTRUCTIONS" in caught.value.fix


def test_a_block_may_wait_for_a_later_one() -> None:
    """A flag in global memory that block 63 sets: blocks have their turns, though not all are executed together."""
    text = kernel_text(
        """
        mov.u32 %r1, %ctaid.x;
        setp.eq.u32 %p1, %r1, 63;
        setp.eq.u32 %p2, %r_tid, 0;
        and.pred %p3, %p1, %p2;
        @%p3 atom.global.gpu.release.exch.b32 %r2, [%d_flag], 1;
        wait:
        ld.global.acquire.gpu.b32 %r3, [%d_flag];
        setp.eq.s32 %p4, %r3, 0;
        @%p4 bra wait;
        @%p2 atom.global.gpu.relaxed.add.u32 %r4, [%d_flag+4], 1;
        """,
        ["flag"],
        threads=256,
    )
    flag = np.zeros(2, np.int32)
    assert not run_text(text, {"flag": flag}, threads=256, grid=(64, 1, 1)).findings
    assert flag.tolist() == [1, 64]


WARP = """
shfl.sync.idx.b32 %r1|%p1, %r_tid, %r_tid, 31, -1;
shfl.sync.up.b32 %r2|%p2, %r_tid, 3, 0, -1;
shfl.sync.down.b32 %r3|%p3, %r_tid, 5, 0x180f, -1;
redux.sync.add.s32 %r4, %r_tid, -1;
setp.gt.u32 %p4, %r_tid, 11;
vote.sync.ballot.b32 %r5, %p4, -1;
elect.sync %r6|%p5, -1;
selp.b32 %r7, 1, 0, %p2;
selp.b32 %r8, 1, 0, %p5;
mad.wide.u32 %d1, %r_tid, 32, %d_y;
st.global.v4.b32 [%d1], {%r1, %r2, %r3, %r4};
st.global.v4.b32 [%d1+16], {%r5, %r6, %r7, %r8};
"""


def test_what_a_warp_does_together() -> None:
    y = np.zeros((32, 8), np.int64).astype(np.uint32)
    assert not run_text(kernel_text(WARP, ["y"]), {"y": y}, unwritten=["y"]).findings
    lane = np.arange(32)
    np.testing.assert_array_equal(y[:, 0], lane)
    np.testing.assert_array_equal(y[:, 1], np.where(lane >= 3, lane - 3, lane))
    # Segments of 8 lanes: the mask 0x18 keeps bits 3 and 4, and 0x0f is cut to the segment's last lane.
    np.testing.assert_array_equal(y[:, 2], np.where(lane + 5 <= lane | 7, lane + 5, lane))
    assert (y[:, 3] == 496).all() and (y[:, 4] == 0xFFFFF000).all() and (y[:, 5] == 0).all()
    np.testing.assert_array_equal(y[:, 6], lane >= 3)
    np.testing.assert_array_equal(y[:, 7], lane == 0)
