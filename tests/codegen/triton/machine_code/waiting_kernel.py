"""A kernel that asks for its weights before it waits for the launch before, and one that stores before it waits."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def waiting_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, y_ptr: tl.tensor, TURNS: tl.constexpr, STORES_FIRST: tl.constexpr
) -> None:
    """y = x · Σ_i weight[i], after the wait; with STORES_FIRST something is stored before it."""
    place = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    gdc_launch_dependents()
    first = tl.load(weight_ptr + place)
    if STORES_FIRST:
        tl.store(y_ptr + place, first)
    gdc_wait()
    sums = first.to(tl.float32)
    for turn in range(1, TURNS):
        sums += tl.load(weight_ptr + turn * 1048576 + place).to(tl.float32)
    tl.store(y_ptr + place, (sums * tl.load(x_ptr + place).to(tl.float32)).to(tl.bfloat16))


@triton.jit
def leaving_kernel(x_ptr: tl.tensor, weight_ptr: tl.tensor, y_ptr: tl.tensor, count: int) -> None:
    """y = x · weight, of the first `count` programs; the others end without waiting."""
    program = tl.program_id(0)
    if program >= count:
        return
    gdc_wait()
    place = program * 1024 + tl.arange(0, 1024)
    tl.store(y_ptr + place, tl.load(weight_ptr + place) * tl.load(x_ptr + place))
