"""Each check finds its fault: kernels that are right, and the same with an index moved, or a wait, fence or barrier
taken out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llmc.ptx.errors import PtxError
from llmc.ptx.finding import Check, Finding
from llmc.ptx.machine import Report
from tests.ptx.ptx_text import kernel_text, run_text, the_finding

# Threads exchange words through shared memory: each writes its own, and reads that of another warp.
EXCHANGE = """
mad.wide.u32 %d1, %r_all, 4, %d_x;
ld.global.b32 %r1, [%d1];
mad.lo.s32 %r2, %r_tid, 4, %r_smem;
st.shared.b32 [%r2], %r1;
bar.sync 0;
xor.b32 %r3, %r_tid, 32;
mad.lo.s32 %r4, %r3, 4, %r_smem;
ld.shared.b32 %r5, [%r4];
bar.sync 1;
st.shared.b32 [%r2], %r5;
mad.wide.u32 %d2, %r_all, 4, %d_y;
st.global.b32 [%d2], %r5;
"""


def edited(body: str, edits: Sequence[tuple[str, str]]) -> str:
    """The text with the first of each old text in place of a new one."""
    for old, new in edits:
        assert old in body, f"there is no {old!r}"
        body = body.replace(old, new, 1)
    return body


def exchange(
    *edits: tuple[str, str], words: int = 128, shared_bytes: int = 256, unwritten: Sequence[str] = ("y",)
) -> Report:
    """Run EXCHANGE with edits, of two blocks."""
    arrays = {"x": np.arange(words, dtype=np.int32), "y": np.zeros(128, np.int32)}
    text = kernel_text(edited(EXCHANGE, edits), ["x", "y"], threads=64)
    return run_text(
        text, arrays, threads=64, grid=(2, 1, 1), shared_bytes=shared_bytes, unwritten=unwritten, read_only=["x"]
    )


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert not exchange().findings


def test_a_store_behind_the_end_of_a_buffer() -> None:
    finding = the_finding(exchange(("st.global.b32 [%d2]", "st.global.b32 [%d2+4]"), unwritten=[]), Check.BOUNDS)
    assert (finding.block, finding.thread) == ((1, 0, 0), 63)
    assert "0 bytes after the end of y" in finding.detail


def test_a_load_before_a_buffer() -> None:
    finding = the_finding(exchange(("ld.global.b32 %r1, [%d1]", "ld.global.b32 %r1, [%d1+-4]")), Check.BOUNDS)
    assert (finding.block, finding.thread) == ((0, 0, 0), 0)


def test_shared_memory_behind_its_end() -> None:
    report = exchange(shared_bytes=252)
    assert {finding.check for finding in report.findings} == {Check.BOUNDS}
    assert report.findings[0].thread == 63
    assert report.findings[0].detail == "shared memory at byte 252 is not within the 252 bytes of shared memory"


def test_a_misaligned_vector() -> None:
    moved = ("ld.global.b32 %r1, [%d1]", "ld.global.v2.b32 {%r1, %r6}, [%d1]")
    finding = the_finding(exchange(moved, words=130), Check.ALIGNMENT)
    assert finding.thread == 1 and finding.detail.endswith("is not a multiple of 8")


def test_a_write_to_what_is_only_read() -> None:
    report = exchange(("mad.wide.u32 %d2, %r_all, 4, %d_y", "mad.wide.u32 %d2, %r_all, 4, %d_x"), unwritten=[])
    assert the_finding(report, Check.READ_ONLY).detail == "x"


def test_shared_memory_that_nobody_wrote() -> None:
    report = exchange(("xor.b32 %r3, %r_tid, 32", "add.s32 %r3, %r_tid, 32"), shared_bytes=512)
    assert the_finding(report, Check.UNWRITTEN).thread == 32


def test_a_buffer_that_nobody_wrote() -> None:
    own = "mad.wide.u32 %d2, %r_all, 4, %d_y;\nld.global.b32 %r1, [%d2]"
    assert the_finding(exchange(("ld.global.b32 %r1, [%d1]", own)), Check.UNWRITTEN).detail == "y"


def test_an_element_of_an_output_that_is_not_written() -> None:
    report = exchange(("st.global.b32 [%d2], %r5;", "setp.ne.s32 %p1, %r_tid, 7;\n@%p1 st.global.b32 [%d2], %r5;"))
    finding = the_finding(report, Check.OUTPUT)
    assert finding.detail == "8 bytes of y, the first of them byte 28" and finding.block is None


def test_a_read_without_a_barrier_behind_the_write() -> None:
    finding = the_finding(exchange(("bar.sync 0;", "")), Check.RACE)
    assert finding.detail == "it was written by thread 32" and finding.thread == 0


def test_a_write_without_a_barrier_behind_the_read() -> None:
    finding = the_finding(exchange(("bar.sync 1;", "")), Check.RACE)
    assert finding.detail == "it was read before by thread 0" and finding.thread == 32


def test_two_writes_in_one_instruction() -> None:
    report = exchange(("st.shared.b32 [%r2], %r1;", "st.shared.b32 [%r_smem], %r1;\nst.shared.b32 [%r2], %r1;"))
    races = [finding for finding in report.findings if "in the same instruction" in finding.detail]
    assert len(races) == 1 and races[0].check is Check.RACE


WITHIN_A_WARP = """
mad.lo.s32 %r2, %r_tid, 4, %r_smem;
st.shared.b32 [%r2], %r_tid;
bar.warp.sync -1;
xor.b32 %r3, %r_tid, 1;
mad.lo.s32 %r4, %r3, 4, %r_smem;
ld.shared.b32 %r5, [%r4];
"""


def test_a_read_in_a_warp_without_its_barrier() -> None:
    assert not run_text(kernel_text(WITHIN_A_WARP), {}, shared_bytes=128).findings
    report = run_text(kernel_text(WITHIN_A_WARP.replace("bar.warp.sync -1;", "")), {}, shared_bytes=128)
    assert the_finding(report, Check.RACE).detail == "it was written by thread 1"


@pytest.mark.parametrize("reads", [True, False])
def test_a_matrix_of_rows_that_threads_have_touched_without_a_barrier(reads: bool) -> None:
    """Each thread stores, or loads, the row whose address it gives: the matrix instruction takes it for others."""
    own = "st.shared.v4.b32 [%r2], {%r_tid, %r_tid, %r_tid, %r_tid};"
    body = f"""
    mad.lo.s32 %r2, %r_tid, 16, %r_smem;
    {own}
    bar.warp.sync -1;
    {own if reads else "ld.shared.b32 %r3, [%r2];"}
    bar.warp.sync -1;
    {"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r2];" if reads else ""}
    {"stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%r3};" if not reads else ""}
    """
    assert not run_text(kernel_text(body), {}, shared_bytes=512).findings
    first, _, second = body.rpartition("bar.warp.sync -1;")
    report = run_text(kernel_text(first + second), {}, shared_bytes=512)
    assert the_finding(report, Check.RACE).thread == 0


# ---- cp.async --------------------------------------------------------------------------------------------------------

COPY = """
mad.wide.u32 %d1, %r_tid, 16, %d_x;
mad.lo.s32 %r2, %r_tid, 16, %r_smem;
cp.async.cg.shared.global [%r2], [%d1], 16;
cp.async.commit_group;
cp.async.wait_group 0;
bar.sync 0;
xor.b32 %r3, %r_tid, 32;
mad.lo.s32 %r4, %r3, 16, %r_smem;
ld.shared.b32 %r5, [%r4];
bar.sync 0;
st.shared.b32 [%r2], %r5;
mad.wide.u32 %d2, %r_tid, 4, %d_y;
st.global.b32 [%d2], %r5;
"""


def copy(*removed: str) -> Report:
    """Run COPY without some lines."""
    body = edited(COPY, [(line, "") for line in removed])
    x, y = np.arange(256, dtype=np.int32), np.zeros(64, np.int32)
    arguments = {"x": x, "y": y}
    return run_text(kernel_text(body, ["x", "y"], threads=64), arguments, threads=64, shared_bytes=1024)


def test_copies_that_are_waited_for() -> None:
    assert not copy().findings


def test_a_copy_without_its_wait() -> None:
    finding = copy("cp.async.wait_group 0;").findings[0]
    assert finding.check is Check.ASYNC_COPY and finding.instruction is not None
    assert finding.instruction.opcode == "ld.shared.b32" and finding.thread == 0


def test_a_copy_whose_group_is_not_committed() -> None:
    assert copy("cp.async.commit_group;").findings[0].check is Check.ASYNC_COPY


def test_a_copy_without_a_barrier_behind_its_wait() -> None:
    finding = copy("bar.sync 0;").findings[0]
    assert finding.check is Check.RACE and finding.detail == "it was written by thread 32"


def test_the_target_of_a_copy_written_before_its_wait() -> None:
    body = COPY.replace("cp.async.commit_group;", "st.shared.b32 [%r2], %r_tid;\ncp.async.commit_group;")
    x, y = np.arange(256, dtype=np.int32), np.zeros(64, np.int32)
    report = run_text(kernel_text(body, ["x", "y"], threads=64), {"x": x, "y": y}, threads=64, shared_bytes=1024)
    assert report.findings[0].check is Check.ASYNC_COPY


def test_copies_of_fewer_bytes_are_filled_up_with_zeros() -> None:
    """Thread t copies its first t % 17 bytes. A misaligned source is reported only where bytes are read."""
    body = edited(
        COPY,
        [
            ("cp.async.cg.shared.global [%r2], [%d1], 16;", "cp.async.cg.shared.global [%r2], [%d1], 16, %r6;"),
            ("cp.async.cg", "rem.u32 %r6, %r_tid, 17;\ncp.async.cg"),
            ("ld.shared.b32 %r5, [%r4];", "ld.shared.v4.b32 {%r5, %r7, %r8, %r9}, [%r4];"),
            ("mad.wide.u32 %d2, %r_tid, 4, %d_y;", "mad.wide.u32 %d2, %r_tid, 16, %d_y;"),
            ("st.global.b32 [%d2], %r5;", "st.global.v4.b32 [%d2], {%r5, %r7, %r8, %r9};"),
        ],
    )
    x, y = np.arange(1, 1025).astype(np.uint8), np.zeros((64, 16), np.uint8)
    report = run_text(kernel_text(body, ["x", "y"], threads=64), {"x": x, "y": y}, threads=64, shared_bytes=1024)
    assert not report.findings, report.findings
    size = np.arange(64)[:, None] % 17
    wanted = np.where(np.arange(16) < size, x.reshape(64, 16), 0)
    np.testing.assert_array_equal(y, wanted[np.arange(64) ^ 32])
    moved = edited(body, [("[%d1], 16, %r6", "[%d1+4], 16, %r6")])
    report = run_text(kernel_text(moved, ["x", "y"], threads=64), {"x": x, "y": y}, threads=64, shared_bytes=1024)
    assert report.findings[0].check is Check.ALIGNMENT and report.findings[0].thread == 1


# ---- wgmma -----------------------------------------------------------------------------------------------------------

_SUMS = "{%r20, %r21, %r22, %r23}"
# Rows of 64 numbers in 128 bytes, of which a product reads 16.
PRODUCT = f"""
mad.lo.s32 %r1, %r_tid, 64, %r_smem;
mov.b32 %r2, 0;
st.shared.v4.b32 [%r1], {{%r2, %r2, %r2, %r2}};
st.shared.v4.b32 [%r1+16], {{%r2, %r2, %r2, %r2}};
st.shared.v4.b32 [%r1+32], {{%r2, %r2, %r2, %r2}};
st.shared.v4.b32 [%r1+48], {{%r2, %r2, %r2, %r2}};
fence.proxy.async.shared::cta;
bar.sync 0;
cvt.u64.u32 %d1, %r_smem;
shr.u64 %d1, %d1, 4;
mov.b64 %d2, {(1 << 62) | (64 << 32) | (1 << 16)};
add.s64 %d3, %d1, %d2;
mov.b32 %r20, 0;
mov.b32 %r21, 0;
mov.b32 %r22, 0;
mov.b32 %r23, 0;
mov.pred %p1, 1;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {_SUMS}, %d3, %d3, %p1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
bar.sync 0;
st.shared.v4.b32 [%r1], {_SUMS};
"""


def product(*edits: tuple[str, str]) -> Report:
    """Run PRODUCT with edits."""
    text = kernel_text(edited(PRODUCT, edits), threads=128)
    return run_text(text, {}, threads=128, shared_bytes=8192)


def test_a_wgmma_that_is_fenced_and_waited_for() -> None:
    assert not product().findings


def test_a_wgmma_without_its_wait() -> None:
    report = product(("wgmma.wait_group.sync.aligned 0;", ""))
    assert [finding.check for finding in report.findings] == [Check.REGISTERS, Check.ASYNC_SOURCE]


def test_a_wgmma_without_its_fence() -> None:
    assert the_finding(product(("wgmma.fence.sync.aligned;", "")), Check.WGMMA_FENCE).thread == 0


def test_sums_changed_behind_the_fence() -> None:
    report = product(("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned;\nadd.s32 %r22, %r22, 1;"))
    assert the_finding(report, Check.WGMMA_FENCE).detail == "%r22 was used since the last"


def test_sums_that_begin_with_a_number_behind_the_fence() -> None:
    """As LLVM leaves it, and ptxas gives to the instruction."""
    moved = ("mov.b32 %r20, 0;", ""), ("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned;\nmov.b32 %r20, 0;")
    assert not product(*moved).findings


def test_operands_of_a_wgmma_without_a_proxy_fence() -> None:
    report = product(("fence.proxy.async.shared::cta;\n", ""))
    assert the_finding(report, Check.PROXY).detail.startswith("it was written by thread")


def test_operands_overwritten_before_the_wait() -> None:
    report = product(("wgmma.wait_group", "st.shared.b32 [%r1], %r2;\nwgmma.wait_group"))
    assert the_finding(report, Check.ASYNC_SOURCE).detail.startswith("it is being read")


def test_a_wgmma_without_a_barrier_behind_its_operands() -> None:
    checks = {finding.check for finding in product(("bar.sync 0;\ncvt", "cvt")).findings}
    assert checks == {Check.RACE}


# ---- griddepcontrol --------------------------------------------------------------------------------------------------

DEPENDENT = """
mad.wide.u32 %d1, %r_tid, 4, %d_w;
ld.global.b32 %r1, [%d1];
griddepcontrol.launch_dependents;
griddepcontrol.wait;
mad.wide.u32 %d2, %r_tid, 4, %d_x;
ld.global.b32 %r2, [%d2];
add.s32 %r3, %r1, %r2;
mad.wide.u32 %d3, %r_tid, 4, %d_y;
st.global.b32 [%d3], %r3;
"""


def dependent(*edits: tuple[str, str], may_begin_early: bool = True) -> Report:
    """Run DEPENDENT with edits: weights may be read before the wait."""
    w, x, y = (np.arange(32, dtype=np.int32) for _ in range(3))
    return run_text(
        kernel_text(edited(DEPENDENT, edits), ["w", "x", "y"]),
        {"w": w, "x": x, "y": y},
        constant=["w"],
        may_begin_early=may_begin_early,
    )


def test_weights_may_be_read_before_earlier_launches_end() -> None:
    assert not dependent().findings


def test_a_load_before_the_wait_for_earlier_launches() -> None:
    early = ("griddepcontrol.wait;", ""), ("add.s32", "griddepcontrol.wait;\nadd.s32")
    finding = the_finding(dependent(*early), Check.GRID_DEPENDENCY)
    assert finding.detail == "it loads from x"
    assert not dependent(*early, may_begin_early=False).findings


def test_a_store_before_the_wait_for_earlier_launches() -> None:
    report = dependent(("griddepcontrol.wait;", "st.global.b32 [%d_y], %r1;\ngriddepcontrol.wait;"))
    assert the_finding(report, Check.GRID_DEPENDENCY).detail == "it stores to y"


def test_no_wait_at_all_for_earlier_launches() -> None:
    details = [finding.detail for finding in dependent(("griddepcontrol.wait;", "")).findings]
    assert details[:2] == ["it loads from x", "it stores to y"] and details[2].startswith("it returns")


def test_a_return_without_the_wait_for_earlier_launches() -> None:
    report = dependent(("griddepcontrol.wait;", "setp.gt.s32 %p1, %r_tid, 15;\n@%p1 ret;\ngriddepcontrol.wait;"))
    finding = the_finding(report, Check.GRID_DEPENDENCY)
    assert finding.thread == 16 and finding.detail.startswith("it returns")


# ---- what a finding says ---------------------------------------------------------------------------------------------


def test_a_finding_names_kernel_block_thread_ptx_line_and_source() -> None:
    located = '.file 1 "kernel.py"\n.file 2 "library.py"\n'
    edit = "ld.global.b32 %r1, [%d1]", ".loc 2 40 3, function_name $L, inlined_at 1 12 5\nld.global.b32 %r1, [%d1+-4]"
    body = located + EXCHANGE.replace(*edit)
    x, y = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    report = run_text(kernel_text(body, ["x", "y"], threads=64), {"x": x, "y": y}, threads=64, shared_bytes=256)
    finding: Finding = the_finding(report, Check.BOUNDS)
    text = kernel_text(body, ["x", "y"], threads=64).splitlines()
    line = 1 + next(i for i, line_text in enumerate(text) if "ld.global" in line_text)
    assert str(finding).endswith(
        f"; k, block (0, 0, 0), thread 0, PTX line {line} (ld.global.b32), library.py:40, called from kernel.py:12"
    )
    assert report.counts == (1,)


def test_a_barrier_that_a_warp_reaches_twice() -> None:
    body = "setp.lt.u32 %p1, %r_tid, 32;\n@%p1 bar.arrive 3, 64;\n@%p1 bar.arrive 3, 64;\n@!%p1 bar.sync 3, 64;"
    report = run_text(kernel_text(body, threads=64), {}, threads=64)
    assert the_finding(report, Check.BARRIER).detail == "a warp arrives at barrier 3 again before it is complete"


def test_a_barrier_that_is_none() -> None:
    report = run_text(kernel_text("bar.sync 16, 64;", threads=64), {}, threads=64)
    assert the_finding(report, Check.BARRIER).detail == "there is no barrier 16, the last is 15"


def test_a_barrier_for_as_many_to_some_and_more_to_others() -> None:
    body = "setp.lt.u32 %p1, %r_tid, 32;\n@%p1 bar.arrive 3, 64;\n@!%p1 bar.sync 3, 32;"
    report = run_text(kernel_text(body, threads=64), {}, threads=64)
    assert report.findings[0].detail == "barrier 3 is for 64 threads to some, for 32 to others"


def test_a_mask_that_leaves_lanes_out() -> None:
    report = run_text(kernel_text("mov.b32 %r2, 0xFFFF;\nshfl.sync.bfly.b32 %r1, %r_tid, 1, 31, %r2;"), {})
    assert the_finding(report, Check.DIVERGENCE).detail == "its mask leaves lanes of the warp out"


def test_a_wgmma_of_some_warps_of_a_warpgroup() -> None:
    alone = [
        ("wgmma.fence", "setp.lt.u32 %p2, %r_tid, 96;\n@!%p2 bra past;\nwgmma.fence"),
        ("bar.sync 0;\nst", "past:\nbar.sync 0;\nst"),
    ]
    report = product(*alone)
    assert report.findings[0].check is Check.DIVERGENCE
    assert report.findings[0].detail == "some warps of a warpgroup are missing"


def test_a_part_of_a_warp_at_an_instruction_for_all_of_it() -> None:
    body = """
    setp.lt.u32 %p1, %r_tid, 16;
    @%p1 bra part;
    bar.sync 0;
    bra.uni end;
    part:
    redux.sync.add.s32 %r1, %r_tid, -1;
    bar.sync 0;
    end:
    """
    with pytest.raises(PtxError, match="for the other threads of its warp"):
        run_text(kernel_text(body), {})
