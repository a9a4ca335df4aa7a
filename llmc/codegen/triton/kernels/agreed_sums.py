"""Sums over the threads of a warp that all of these agree on.

A sum across lanes exchanges what each thread has. Where that is a product, LLVM fuses it into the first addition: each
thread adds its own product, exact, to its neighbour's, rounded. The two then have different sums, and where threads
store them to one place, as layouts do, PTX does not say which one stays. A product that is fused with a 0 is rounded by
itself.
"""

import triton
import triton.language as tl


@triton.jit
def sum_of_products(a: tl.tensor, b: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """tl.sum(a * b, axis) in fp32, the same bits in every thread that holds it."""
    return tl.sum(tl.fma(a, b, 0.0), axis)


@triton.jit
def agreed_sum(x: tl.tensor, axis: tl.constexpr, keep_dims: tl.constexpr) -> tl.tensor:
    """tl.sum(x, axis) in fp32, the same bits in every thread that holds it.

    x: not a square, except tl.fma(a, a, 0.0): LLVM omits an addition of 0 to a value that cannot be -0.0.
    """
    return tl.sum(x + 0.0, axis, keep_dims)
