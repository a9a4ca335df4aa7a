"""Whether Triton's interpreter runs the kernels: it gets products of bf16 operands wrong, so there they are widened."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
