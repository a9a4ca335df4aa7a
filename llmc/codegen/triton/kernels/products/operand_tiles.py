"""Device code of the loops of products: how a tile of an operand is read, and how two of them are multiplied."""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.interpreted import INTERPRETED


@triton.jit
def read_tile(pointers: tl.tensor, inside: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """Load a tile, with zeros where `inside` is false; without a mask if not MASKED."""
    if MASKED:
        return tl.load(pointers, mask=inside, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def multiply(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a·b. fp32 operands are multiplied in fp32, not rounded to tf32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
