"""Which thread holds which element of a matrix: the tables of the PTX manual, written down once more, element by
element. Matrices are of small whole numbers, whose sums are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmc.ptx.element_types import ELEMENT_TYPES
from llmc.ptx.rounding import bf16_of_f32, e4m3_of_f32, e5m2_of_f32
from tests.ptx.ptx_text import Array, kernel_text, run_text

Place = tuple[int, int]
ENCODERS: dict[str, Callable[[Array], Array]] = {
    "bf16": bf16_of_f32,
    "f16": lambda x: x.astype(np.float16).view(np.uint16),
    "tf32": lambda x: x.view(np.uint32),
    "s8": lambda x: x.astype(np.int8).view(np.uint8),
    "e4m3": e4m3_of_f32,
    "e5m2": e5m2_of_f32,
}


def whole_numbers(seed: int, rows: int, columns: int) -> Array:
    return np.random.default_rng(seed).integers(-4, 5, (rows, columns)).astype(np.float32)


def a_place(lane: int, i: int, per_word: int) -> Place:
    """Element i of thread `lane` in A, for 4, 2 or 1 elements a register."""
    group, thread = lane >> 2, lane % 4
    register, inner = divmod(i, per_word)
    row = group if register % 2 == 0 else group + 8
    column = thread * per_word + inner + (0 if register < 2 else 4 * per_word)
    return row, column


def b_place(lane: int, i: int, per_word: int) -> Place:
    group, thread = lane >> 2, lane % 4
    register, inner = divmod(i, per_word)
    return thread * per_word + inner + register * 4 * per_word, group


def c_place(lane: int, i: int) -> Place:
    """Of 8 columns; of more, each four registers are the next 8."""
    group, thread = lane >> 2, lane % 4
    return group + (8 if i % 4 >= 2 else 0), 8 * (i // 4) + thread * 2 + (i & 1)


def words_of(matrix: Array, kind: str, count: int, place: Callable[[int, int, int], Place]) -> Array:
    """[lanes, registers] of a matrix that is spread over a warp."""
    codes = ENCODERS[kind](matrix)
    per_word = 4 // codes.itemsize
    held = [[codes[place(lane, i, per_word)] for i in range(count * per_word)] for lane in range(32)]
    return np.array(held, codes.dtype).view(np.uint32)


MMA = [
    ("m16n8k16", "bf16", "f32"),
    ("m16n8k16", "f16", "f32"),
    ("m16n8k8", "bf16", "f32"),
    ("m16n8k8", "tf32", "f32"),
    ("m16n8k4", "tf32", "f32"),
    ("m16n8k32", "s8", "s32"),
    ("m16n8k16", "s8", "s32"),
    ("m16n8k32", "e4m3", "f32"),
    ("m16n8k32", "e5m2", "f32"),
]


@pytest.mark.parametrize(("shape", "kind", "sums"), MMA)
def test_mma(shape: str, kind: str, sums: str) -> None:
    columns = int(shape.split("k")[1])
    words = columns * ELEMENT_TYPES[kind].bits.itemsize // 16
    a, b, c = whole_numbers(0, 16, columns), whole_numbers(1, columns, 8), whole_numbers(2, 16, 8)
    dtype: Any = np.int32 if sums == "s32" else np.float32
    c_words = np.array([[c[c_place(lane, i)] for i in range(4)] for lane in range(32)], dtype)
    a_words, b_words = words_of(a, kind, 2 * words, a_place), words_of(b, kind, words, b_place)
    given = np.concatenate([a_words, b_words, c_words.view(np.uint32)], axis=1)
    names = [f"%r{i}" for i in range(given.shape[1])]
    loads = [f"ld.global.b32 {name}, [%d1+{4 * i}];" for i, name in enumerate(names)]
    parts = names[: 2 * words], names[2 * words : 3 * words], names[3 * words :]
    listed = ", ".join("{" + ", ".join(part) + "}" for part in (parts[2], *parts))
    body = [f"mad.wide.u32 %d1, %r_tid, {4 * len(names)}, %d_x;", *loads]
    body += [f"mma.sync.aligned.{shape}.row.col.{sums}.{kind}.{kind}.{sums} {listed};"]
    body += [f"st.global.b32 [%d1+{4 * i}], {name};" for i, name in enumerate(names)]
    assert not run_text(kernel_text("\n".join(body), ["x"]), {"x": given}).findings
    sums_out, wanted = given[:, 3 * words :].view(dtype), a @ b + c
    for lane in range(32):
        for i in range(4):
            assert sums_out[lane, i] == wanted[c_place(lane, i)], (lane, i)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count: int, is_transposed: bool) -> None:
    """Threads 8·i to 8·i + 7 say where the rows of matrix i are. A thread gets two neighbours of row lane / 4, from
    column 2·(lane % 4) on, or of the transposed matrix."""
    halves = np.random.default_rng(0).integers(0, 2**16, (count, 8, 8), dtype=np.uint16)
    registers, copied = np.zeros((32, count), np.uint32), np.zeros((count, 8, 8), np.uint16)
    names = ", ".join(f"%r{10 + i}" for i in range(count))
    suffix = f"m8n8.x{count}{'.trans' if is_transposed else ''}.shared.b16"
    body = f"""
    setp.lt.u32 %p1, %r_tid, {8 * count};
    mad.wide.u32 %d1, %r_tid, 16, %d_x;
    mad.lo.u32 %r1, %r_tid, 16, %r_smem;
    @%p1 ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d1];
    @%p1 st.shared.v4.b32 [%r1], {{%r2, %r3, %r4, %r5}};
    bar.sync 0;
    ldmatrix.sync.aligned.{suffix} {{{names}}}, [%r1];
    bar.sync 0;
    stmatrix.sync.aligned.{suffix} [%r1], {{{names}}};
    bar.sync 0;
    @%p1 ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r1];
    mad.wide.u32 %d2, %r_tid, 16, %d_z;
    @%p1 st.global.v4.b32 [%d2], {{%r2, %r3, %r4, %r5}};
    mad.wide.u32 %d3, %r_tid, {4 * count}, %d_y;
    """
    body += "\n".join(f"st.global.b32 [%d3+{4 * i}], %r{10 + i};" for i in range(count))
    text = kernel_text(body.replace("mad.lo.u32", "mad.lo.s32"), ["x", "y", "z"])
    assert not run_text(text, {"x": halves, "y": registers, "z": copied}, shared_bytes=512).findings
    for lane in range(32):
        for i in range(count):
            row, column = lane // 4, 2 * (lane % 4)
            matrix = halves[i].T if is_transposed else halves[i]
            assert registers[lane, i] == int(matrix[row, column]) | int(matrix[row, column + 1]) << 16, (lane, i)
    np.testing.assert_array_equal(copied, halves)


def canonical_offset(
    line: int, depth: int, size: int, swizzle: int, is_transposed: bool, leading: int, stride: int
) -> int:
    """Where element (line of M or N, depth of K) lies from the matrix' start on, in bytes: the manual's canonical
    layouts in units of T elements (16 bytes), then the swizzle's exclusive or."""
    t, w = 16 // size, max(swizzle // 16, 1)
    if is_transposed:  # ((T, W, m), (8, k)) : ((1, T, LBO), (W·T, SBO)); without a swizzle SBO and LBO change places
        inner, unit, atom = line % t, line // t % w, line // (t * w)
        row, group = depth % 8, depth // 8
        far = (stride, leading) if not swizzle else (leading, stride)
        offset = (inner + unit * t + row * w * t) * size + atom * far[0] + group * far[1]
    else:  # ((8, m), (T, 2)) : ((W·T, SBO), (1, T)); without a swizzle the second of two units is LBO away
        row, group = line % 8, line // 8
        inner, unit = depth % t, depth // t
        offset = (row * w * t + inner) * size + group * stride + unit * (leading if not swizzle else 16)
    moved = offset >> 7 & max(swizzle // 16 - 1, 0)
    return offset ^ moved << 4


WGMMA = [
    *((kind, swizzle, "ss", False) for kind in ("bf16", "f16") for swizzle in (0, 32, 64, 128)),
    *(("bf16", swizzle, "ss", True) for swizzle in (0, 32, 64, 128)),
    *((kind, 128, "ss", False) for kind in ("s8", "e4m3")),
    ("s8", 32, "rs", False),
    ("bf16", 64, "rs", False),
    ("bf16", 128, "rs", True),
]
SWIZZLE_CODES = {0: 0, 128: 1, 64: 2, 32: 3}
B_AT = 1 << 15
# Leading and stride dimension's byte offsets, by whether matrices are transposed and swizzled.
STRIDES = {
    (False, False): (128, 1024),
    (False, True): (16, 1024),
    (True, False): (1024, 2048),
    (True, True): (4096, 2048),
}


@pytest.mark.parametrize(("kind", "swizzle", "ways", "is_transposed"), WGMMA)
def test_wgmma(kind: str, swizzle: int, ways: str, is_transposed: bool) -> None:
    """A from shared memory or registers, B from shared memory, both transposed or neither; twice, the sums added."""
    size, columns = ELEMENT_TYPES[kind].bits.itemsize, 32
    depth = 32 // size
    dtype: Any = np.int32 if kind == "s8" else np.float32
    a, b = whole_numbers(0, 64, depth), whole_numbers(1, columns, depth)
    leading, stride = STRIDES[is_transposed, swizzle > 0]
    shared = np.zeros(2 * B_AT, np.uint8)
    for matrix, at in ((a, 0), (b, B_AT)):
        codes = ENCODERS[kind](matrix)
        for line, k in np.ndindex(*matrix.shape):
            offset = at + canonical_offset(line, k, size, swizzle, is_transposed, leading, stride)
            shared[offset : offset + size] = codes[line : line + 1, k].view(np.uint8)
    descriptor = SWIZZLE_CODES[swizzle] << 62 | stride >> 4 << 32 | leading >> 4 << 16
    fragments = [words_of(a[16 * w : 16 * w + 16], kind, 4, a_place) for w in range(4)]
    a_words = np.concatenate(fragments).astype(np.uint32)
    sums = [f"%r{20 + i}" for i in range(columns // 2)]
    stored = np.zeros((128, len(sums)), dtype)
    first = "%d5" if ways == "ss" else "{%r10, %r11, %r12, %r13}"
    turns = "" if dtype is np.int32 else ", 1, 1" if kind == "e4m3" else f", 1, 1, {int(is_transposed)}"
    turns += f", {int(is_transposed)}" if kind in ("bf16", "f16") and ways == "ss" else ""
    product = (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{'s32' if dtype is np.int32 else 'f32'}.{kind}.{kind}"
    )
    lines = f"""
    mad.wide.u32 %d1, %r_tid, 16, %d_x;
    mad.lo.s32 %r1, %r_tid, 16, %r_smem;
    mov.b32 %r2, 0;
    copy:
    ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%d1];
    st.shared.v4.b32 [%r1], {{%r3, %r4, %r5, %r6}};
    add.s64 %d1, %d1, 2048;
    add.s32 %r1, %r1, 2048;
    add.s32 %r2, %r2, 1;
    setp.lt.s32 %p1, %r2, {shared.size // 2048};
    @%p1 bra copy;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mad.wide.u32 %d2, %r_tid, 16, %d_a;
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d2];
    cvt.u64.u32 %d3, %r_smem;
    shr.u64 %d3, %d3, 4;
    mov.b64 %d4, {descriptor};
    add.s64 %d5, %d3, %d4;
    add.s64 %d6, %d5, {B_AT >> 4};
    mov.pred %p2, 0;
    mov.pred %p3, 1;
    wgmma.fence.sync.aligned;
    {product} {{{", ".join(sums)}}}, {first}, %d6, %p2{turns};
    {product} {{{", ".join(sums)}}}, {first}, %d6, %p3{turns};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mad.wide.u32 %d7, %r_tid, {4 * len(sums)}, %d_y;
    """
    lines += "\n".join(f"st.global.b32 [%d7+{4 * i}], {name};" for i, name in enumerate(sums))
    text = kernel_text(lines, ["x", "a", "y"], threads=128)
    report = run_text(text, {"x": shared, "a": a_words, "y": stored}, threads=128, shared_bytes=shared.size)
    assert not report.findings, report.findings
    wanted = 2 * (a @ b.T)
    for thread in range(128):
        for i in range(len(sums)):
            row, column = c_place(thread % 32, i)
            assert stored[thread, i] == wanted[16 * (thread // 32) + row, column], (thread, i)
