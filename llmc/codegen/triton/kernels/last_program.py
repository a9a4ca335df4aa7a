"""Which of several programs is the last to have stored its part of a result, so that it finishes the result.

Each program stores its part and then adds one to a counter. The one that finds all the others counted reads their
parts, in their order: the result does not depend on which program is last. It also sets the counter back to zero, for
the next launch.

Memory order: a program's stores are before its release (a barrier of the block, then one thread's atomic), and the last
program's loads are after its acquire. Source: the PTX memory model, causality order.
"""

import triton
import triton.language as tl


@triton.jit
def is_last(arrivals_ptr: tl.tensor, place: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """Whether the other programs, of `programs` that share a counter, have all called this before. place: the counter,
    int32, below MOST_COUNTERS."""
    tl.debug_barrier()
    last = tl.atomic_add(arrivals_ptr + place, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(arrivals_ptr + place, 0)
    tl.debug_barrier()
    return last
