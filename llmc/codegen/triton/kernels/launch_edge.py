"""Where a kernel begins to read what the launch before it wrote."""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.interpreted import INTERPRETED

# A comment in PTX and in AMD's assembly; see llmc/codegen/triton/dependent_launch.py.
WAIT_HERE = "// wait for the launch before"
_ASSEMBLY = tl.constexpr(f"{WAIT_HERE} $0")


@triton.jit
def wait_for_launch_before() -> None:
    """Nothing before it may read what launches write, and nothing before it may write.

    A kernel that does not call it waits at its beginning.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(_ASSEMBLY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
