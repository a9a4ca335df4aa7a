"""Tensor maps, bulk copies and mbarriers: boxes of a matrix, what lies outside it, and every wait and fence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llmc.ptx.errors import PtxError
from llmc.ptx.finding import Check
from llmc.ptx.machine import Report
from llmc.ptx.tensor_map import SWIZZLE_BYTES
from tests.ptx.ptx_text import Array, kernel_text, run_text, the_finding
from tests.ptx.test_planted_faults import edited

# A box has 8 rows of as many numbers as a row of its swizzle has.
ROWS, WIDEST = 8, 32
MAP, BOX, MBARRIER = 0, 1024, 4096


def columns_of(swizzle: int) -> int:
    return SWIZZLE_BYTES[swizzle] // 4 or WIDEST


def _map(address: str, at: str, swizzle: int, rows: int, columns: int) -> str:
    """Thread 0 makes a map in shared memory, warp 0 publishes it."""
    place = f"[%r_smem+{MAP}]"
    fields = [
        f"global_address.shared::cta.b1024.b64 {place}, {address}",
        f"rank.shared::cta.b1024.b32 {place}, 1",
        *(f"box_dim.shared::cta.b1024.b32 {place}, {i}, {size}" for i, size in enumerate((columns_of(swizzle), ROWS))),
        *(f"global_dim.shared::cta.b1024.b32 {place}, {i}, {size}" for i, size in enumerate((columns, rows))),
        f"global_stride.shared::cta.b1024.b64 {place}, 0, {4 * columns}",
        *(f"element_stride.shared::cta.b1024.b32 {place}, {i}, 1" for i in range(2)),
        f"elemtype.shared::cta.b1024.b32 {place}, 7",
        f"swizzle_mode.shared::cta.b1024.b32 {place}, {swizzle}",
    ]
    replaced = "\n".join(f"@%p1 tensormap.replace.tile.{field};" for field in fields)
    return f"""
    @%p2 st.shared::cta.b32 [%r4], 0;
    bar.warp.sync -1;
    {replaced}
    bar.warp.sync -1;
    @%p2 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [{at}], {place}, 0x80;
    @%p2 fence.proxy.tensormap::generic.acquire.gpu [{at}], 0x80;
    bar.sync 0;
    """


def body_of(swizzle: int, rows: int, columns: int) -> str:
    """Two warps: thread 0 copies a box of x to shared memory and from there to the same place of y; in between each
    thread stores four numbers to z, and adds 1 to them. start: column and row of the box."""
    nbytes = 4 * ROWS * columns_of(swizzle)
    mbarrier, load = f"[%r_smem+{MBARRIER}]", "shared::cta.global.mbarrier::complete_tx::bytes"
    return f"""
    setp.eq.u32 %p1, %r_tid, 0;
    setp.lt.u32 %p2, %r_tid, 32;
    mad.lo.s32 %r4, %r_tid, 4, %r_smem;
    ld.global.v2.b32 {{%r5, %r6}}, [%d_start];
    add.s64 %d2, %d_maps, 128;
    {_map("%d_x", "%d_maps", swizzle, rows, columns)}
    {_map("%d_y", "%d2", swizzle, rows, columns)}
    @%p1 mbarrier.init.shared::cta.b64 {mbarrier}, 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, {mbarrier}, {nbytes};
    @%p1 cp.async.bulk.tensor.2d.{load} [%r_smem+{BOX}], [%d_maps, {{%r5, %r6}}], {mbarrier};
    {{
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared::cta.b64 complete, {mbarrier}, 0;
    @!complete bra.uni waitLoop;
    }}
    mad.lo.s32 %r7, %r_tid, 16, %r_smem;
    setp.lt.u32 %p3, %r_tid, {nbytes // 16};
    @%p3 ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r7+{BOX}];
    mad.wide.u32 %d3, %r_tid, 16, %d_z;
    @%p3 st.global.v4.b32 [%d3], {{%r10, %r11, %r12, %r13}};
    add.f32 %r10, %r10, 0f3F800000;
    add.f32 %r11, %r11, 0f3F800000;
    add.f32 %r12, %r12, 0f3F800000;
    add.f32 %r13, %r13, 0f3F800000;
    @%p3 st.shared.v4.b32 [%r7+{BOX}], {{%r10, %r11, %r12, %r13}};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {{%r5, %r6}}], [%r_smem+{BOX}];
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group.read 0;
    bar.sync 0;
    st.shared.b32 [%r7+{BOX}], %r_tid;
    @%p1 mbarrier.inval.shared::cta.b64 {mbarrier};
    """


def run_copy(
    edits: Sequence[tuple[str, str]] = (), start: tuple[int, int] = (0, 0), swizzle: int = 0
) -> tuple[Report, dict[str, Array]]:
    """Run it with edits; the arrays are returned."""
    x = np.arange(24 * 64, dtype=np.float32).reshape(24, 64)
    arrays: dict[str, Array] = {"x": x, "y": np.zeros_like(x), "z": np.zeros((ROWS, columns_of(swizzle)), np.float32)}
    arrays |= {"maps": np.zeros(256, np.uint8), "start": np.array(start, np.int32)}
    text = kernel_text(edited(body_of(swizzle, *x.shape), edits), list(arrays), threads=64)
    return run_text(text, arrays, threads=64, shared_bytes=MBARRIER + 8, read_only=["x"]), arrays


@pytest.mark.parametrize("swizzle", SWIZZLE_BYTES)
@pytest.mark.parametrize("start", [(0, 0), (32, 8), (48, 20), (-8, -3), (60, 3), (5, 0)])
def test_boxes_inside_and_outside_of_a_matrix(start: tuple[int, int], swizzle: int) -> None:
    report, arrays = run_copy(start=start, swizzle=swizzle)
    assert not report.findings, report.findings
    (column, row), x, width = start, arrays["x"], columns_of(swizzle)
    padded = np.pad(x, 64)
    box = padded[64 + row : 64 + row + ROWS, 64 + column : 64 + column + width]
    # Runs of 16 bytes change places: address bits 4 and on by bits 7 and on.
    chunks = box.reshape(-1, 4)
    addresses = 16 * np.arange(len(chunks))
    moved = addresses ^ (addresses >> 7 & max(SWIZZLE_BYTES[swizzle] // 16 - 1, 0)) << 4
    np.testing.assert_array_equal(arrays["z"].reshape(-1, 4)[moved // 16], chunks)
    wanted = np.zeros_like(padded)
    wanted[64 + row : 64 + row + ROWS, 64 + column : 64 + column + width] = box + 1
    np.testing.assert_array_equal(arrays["y"], wanted[64:-64, 64:-64])


def lines_with(text: str) -> list[tuple[str, str]]:
    """Edits that take the first line with a text out."""
    match_line = next(line for line in body_of(0, 24, 64).splitlines() if text in line)
    return [(match_line, "")]


def test_the_target_read_before_its_mbarrier_was_waited_for() -> None:
    report, _ = run_copy([*lines_with("@!complete"), *lines_with("try_wait")])
    finding = report.findings[0]
    assert finding.check is Check.ASYNC_COPY and finding.instruction is not None
    assert finding.instruction.opcode == "ld.shared.v4.b32"


def test_a_store_to_shared_memory_without_a_proxy_fence() -> None:
    report, _ = run_copy(lines_with("fence.proxy.async.shared"))
    assert the_finding(report, Check.PROXY).thread == 0


def test_the_source_of_a_bulk_store_overwritten_before_the_wait() -> None:
    report, _ = run_copy(lines_with("wait_group.read"))
    assert report.findings[0].check is Check.ASYNC_SOURCE and "being read" in report.findings[0].detail


def test_a_return_before_a_bulk_store_has_read() -> None:
    report, _ = run_copy([*lines_with("wait_group.read"), *lines_with("st.shared.b32 [%r7+1024], %r_tid")])
    assert the_finding(report, Check.ASYNC_SOURCE).detail == "it returns while bulk stores read shared memory"


def test_a_map_without_its_fence() -> None:
    with pytest.raises(PtxError, match="lacks 0 of 1 arrivals and 1024 bytes; before that, misused tensor descriptor"):
        run_copy(lines_with("fence.proxy.tensormap"))


def test_a_map_published_without_a_barrier_behind_its_fields() -> None:
    text = "bar.warp.sync -1;\n    @%p2 tensormap.cp_fenceproxy"
    report, _ = run_copy([(text, text.partition("\n")[2])])
    assert report.findings[0].check is Check.RACE and report.findings[0].detail == "it was written by thread 0"


def test_a_map_that_lacks_a_field() -> None:
    with pytest.raises(PtxError, match="misused tensor descriptor: it lacks elemtype"):
        run_copy(lines_with("elemtype"))


def test_an_mbarrier_that_was_not_made() -> None:
    with_none = [*lines_with("mbarrier.init"), *lines_with("@!complete"), *lines_with("try_wait")]
    report, _ = run_copy(with_none)
    assert report.findings[0].check is Check.MBARRIER
    assert report.findings[0].detail == f"there is no mbarrier at byte {MBARRIER}"


def test_more_arrivals_than_an_mbarrier_is_for() -> None:
    report, _ = run_copy(
        [
            ("try_wait.parity", "arrive"),
            ("b64 complete, [%r_smem+4096], 0;", "b64 _, [%r_smem+4096];"),
            *lines_with("@!complete"),
        ]
    )
    checks = [finding.check for finding in report.findings]
    assert checks[0] is Check.MBARRIER and "than the 1 it is for" in report.findings[0].detail


@pytest.mark.parametrize(("nbytes", "lacking"), [(1040, 16), (1008, -16)])
def test_a_phase_that_expects_other_bytes_never_ends(nbytes: int, lacking: int) -> None:
    waits = f"threads 0 to 63 at line .*mbarrier.try_wait.* for phase 0 .* lacks 0 of 1 arrivals and {lacking} bytes"
    with pytest.raises(PtxError, match=waits):
        run_copy([("], 1024;", f"], {nbytes};")])


def test_a_wait_for_another_phase_never_ends() -> None:
    with pytest.raises(PtxError, match=r"waits forever in block 0: threads 0 to 63 .* for phase 1 of the mbarrier"):
        run_copy([("complete, [%r_smem+4096], 0;", "complete, [%r_smem+4096], 1;")])


def request(address: str, *, waits: bool = False, constant: Sequence[str] = ()) -> Report:
    """A thread asks the L2 cache for 128 bytes of x, and stores a number. waits: for launches before it."""
    ask = f"setp.eq.u32 %p1, %r_tid, 0;\n@%p1 cp.async.bulk.prefetch.L2.global [{address}], 128;"
    wait = "griddepcontrol.wait;" if waits else ""
    arrays: dict[str, Array] = {"x": np.zeros(64, np.float32), "y": np.zeros(1, np.int32)}
    text = kernel_text(f"{ask}\n{wait}\n@%p1 st.global.b32 [%d_y], %r_tid;", list(arrays))
    return run_text(text, arrays, constant=constant, may_begin_early=waits)


def test_a_request_to_the_l2_cache() -> None:
    assert not request("%d_x").findings
    assert the_finding(request("%d_x+192"), Check.BOUNDS).thread == 0
    assert the_finding(request("%d_x+8"), Check.ALIGNMENT).thread == 0


def test_a_request_before_the_wait_is_for_what_no_launch_writes() -> None:
    assert not request("%d_x", waits=True, constant=["x"]).findings
    assert the_finding(request("%d_x", waits=True), Check.GRID_DEPENDENCY).thread == 0
