"""Where a kernel begins to read what the launch before it wrote, and what it asks for until then."""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.interpreted import INTERPRETED

# A comment in PTX and in AMD's assembly; see llmc/codegen/triton/dependent_launch.py.
WAIT_HERE = "// wait for the launch before"
_ASSEMBLY = tl.constexpr(f"{WAIT_HERE} $0")
# Bytes that a thread asks for at once: a line of the L2 cache.
LINE = 128
_LINE = tl.constexpr(LINE)
_PREFETCH = tl.constexpr(f"cp.async.bulk.prefetch.L2.global [$1], {LINE}; mov.b32 $0, 0;")


@triton.jit
def wait_for_launch_before() -> None:
    """Nothing before it may read what launches write, and nothing before it may write.

    A kernel that does not call it waits at its beginning.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(_ASSEMBLY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask_for_lines(rows: tl.tensor, LINES: tl.constexpr) -> None:
    """Let the L2 cache fetch the first lines of each row of weights; for sm_90 and later.

    rows: [rows], pointers at multiples of 16 bytes, to memory that no launch writes. LINES: a power of two.
    """
    if not INTERPRETED:
        addresses = rows.to(tl.int64)[:, None] + (tl.arange(0, LINES) * _LINE)[None, :]
        tl.inline_asm_elementwise(_PREFETCH, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)
