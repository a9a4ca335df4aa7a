"""How kernels of several GPUs exchange values: each program writes its own values to its rank's memory, sets a flag on
all ranks, waits for the flags of all ranks, and reads the values of all ranks.

llmc/program/rank_memory.py defines the memory's layout. The number of the exchange is the same on all ranks, since they
run the same launches; it is incremented when the last program of a launch ends. Programs wait for the programs of the
same number on other ranks, so all programs of a launch must run at once: candidates launch at most one per processor.

Memory order: a program's stores are before its release on the flag (a barrier of the block, then one thread's atomic),
and its loads after the acquire of all flags. Source: the PTX memory model, causality order; Triton's own barriers for
symmetric memory in torch.distributed are of the same kind.
"""

import triton
import triton.language as tl


@triton.jit
def rank_memory(ranks_ptr: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """The address of a rank's memory."""
    return tl.load(ranks_ptr + 1 + rank)


@triton.jit
def exchange_number(ranks_ptr: tl.tensor) -> tl.tensor:
    """The number of this launch's exchange. It wraps around, and comparisons allow for that."""
    own = rank_memory(ranks_ptr, tl.load(ranks_ptr))
    return tl.load(own.to(tl.pointer_type(tl.int32))) + 1


@triton.jit
def place_of(
    ranks_ptr: tl.tensor, rank: tl.tensor, number: tl.tensor, like_ptr: tl.tensor, AT: tl.constexpr, SIZE: tl.constexpr
) -> tl.tensor:
    """Where a rank has its values of an exchange, as a pointer to what like_ptr points to. AT, SIZE: bytes."""
    address = rank_memory(ranks_ptr, rank) + AT + (number & 1).to(tl.int64) * SIZE
    # Else the compiler reads one value at a time.
    return tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)


@triton.jit
def tell_ranks(
    ranks_ptr: tl.tensor, number: tl.tensor, program: tl.tensor, FLAGS: tl.constexpr, RANKS: tl.constexpr
) -> None:
    """That this program's values are in their place."""
    tl.debug_barrier()
    rank = tl.load(ranks_ptr)
    for other in tl.static_range(RANKS):
        flag = rank_memory(ranks_ptr, other) + FLAGS + (program * RANKS + rank) * 4
        tl.atomic_xchg(flag.to(tl.pointer_type(tl.int32)), number, sem="release", scope="sys")


@triton.jit
def await_ranks(
    ranks_ptr: tl.tensor,
    number: tl.tensor,
    program: tl.tensor,
    FLAGS: tl.constexpr,
    LOST: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Until that program of all ranks has told this one, or a rank was lost; what is read then is thrown away."""
    own = rank_memory(ranks_ptr, tl.load(ranks_ptr))
    lost = own.to(tl.pointer_type(tl.int32)) + LOST
    for other in tl.static_range(RANKS):
        flag = (own + FLAGS + (program * RANKS + other) * 4).to(tl.pointer_type(tl.int32))
        left = number - tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while left > 0:
            left = number - tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            if tl.load(lost, volatile=True) != 0:
                left = left * 0
    tl.debug_barrier()


@triton.jit
def end_exchange(ranks_ptr: tl.tensor, number: tl.tensor, programs: tl.tensor) -> None:
    """This program has read what it wanted; the last one makes way for the next exchange."""
    words = rank_memory(ranks_ptr, tl.load(ranks_ptr)).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    if tl.atomic_add(words + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(words + 1, 0)
        tl.store(words, number)
