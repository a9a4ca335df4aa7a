"""Pairs of a token and a slot in the order of their experts, ahead of the products with those.

Each program handles one expert. It reads all pairs twice: once to find where its own begin, and once to write them. It
uses no atomics, so that the order of pairs does not depend on other programs. Moves 8·(E + 1)·T·slots bytes, most of
them from the cache.
"""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, named_arguments
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.program.launch_arguments import Argument

_BLOCK = 1024


@triton.jit
def sort_pairs_kernel(
    index_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    tokens: int,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program e: starts[e], and the pairs of expert e from there on. The last program is for pairs of no expert."""
    expert = tl.program_id(0)
    count = tokens * SLOTS
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, count, BLOCK):
        before += (_experts(index_ptr, first, count, EXPERTS, BLOCK) < expert).to(tl.int32)
    start = tl.sum(before, 0)
    tl.store(starts_ptr + expert, start)
    for first in range(0, count, BLOCK):
        is_mine = (_experts(index_ptr, first, count, EXPERTS, BLOCK) == expert).to(tl.int32)
        place = start + tl.cumsum(is_mine, 0) - 1
        tl.store(pairs_ptr + place, first + tl.arange(0, BLOCK), mask=is_mine != 0)
        start += tl.sum(is_mine, 0)


@triton.jit
def _experts(
    index_ptr: tl.tensor, first: tl.tensor, count: tl.tensor, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The experts of the pairs from `first` on: EXPERTS for an invalid index, and more past the last pair."""
    pair = first + tl.arange(0, BLOCK)
    expert = tl.load(index_ptr + pair, mask=pair < count, other=0)
    expert = tl.where((expert < 0) | (expert > EXPERTS), EXPERTS, expert)
    return tl.where(pair < count, expert, EXPERTS + 1).to(tl.int32)


@triton.jit
def expert_of_tile(
    starts_ptr: tl.tensor, tile: tl.tensor, pairs: tl.tensor, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(expert, first place, place behind the last) of the tile-th tile of BLOCK pairs, each of one expert's alone.

    EXPERTS for pairs of none, and more where there is no such tile.
    """
    POWER: tl.constexpr = triton.next_power_of_2(EXPERTS + 1)
    expert = tl.arange(0, POWER)
    start = tl.load(starts_ptr + expert, mask=expert <= EXPERTS, other=0)
    start = tl.where(expert <= EXPERTS, start, pairs)
    end = tl.load(starts_ptr + expert + 1, mask=expert < EXPERTS, other=0)
    end = tl.where(expert < EXPERTS, end, pairs)
    tiles = (end - start + BLOCK - 1) // BLOCK
    found = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    earlier = tl.sum(tl.where(expert < found, tiles, 0), 0)
    first = tl.sum(tl.where(expert == found, start, 0), 0) + (tile - earlier) * BLOCK
    return found, first, tl.sum(tl.where(expert == found, end, 0), 0)


def sort_launch(call: Call) -> tuple[DeviceLaunch, dict[str, Argument]]:
    """The launch for a product of experts, and what the product then reads."""
    (slots,), experts, count = call.shape("index"), call.plain("experts"), call.count("index")
    pairs = call.workspace("pairs", count, slots, torch.int32).pointer
    starts = call.workspace("starts", 1, experts + 1, torch.int32).pointer
    sorted_pairs: dict[str, Argument] = {"pairs_ptr": pairs, "starts_ptr": starts}
    launch = DeviceLaunch(
        sort_pairs_kernel,
        named_arguments(sort_pairs_kernel, call, **sorted_pairs, tokens=count),
        {"SLOTS": slots, "EXPERTS": experts, "BLOCK": _BLOCK},
        (str(experts + 1),),
        num_stages=1,
    )
    return launch, sorted_pairs


sort_pairs_budget = Budget("sort_pairs_kernel")
