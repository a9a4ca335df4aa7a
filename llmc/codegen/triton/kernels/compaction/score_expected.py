"""llmc::score_expected: the attention that a request's keys can expect from queries after the last token.

    expected[h, r] = w[h] · (k[r], |pairs of k[r]|),   score[r] = max over heads h of a group of z(expected[h, r])

Three launches: the mean queries, turned to the positions of later ones (w, turned_means.py), expected attention and
what z needs of each part of rows, and the scores. Memory-bound: keys are read once for each group of query heads.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.attention.kv_write import cache_codes, refuse_format
from llmc.codegen.triton.kernels.compaction.compaction_numbers import block_of, first_free, pinned_rows
from llmc.codegen.triton.kernels.compaction.key_channels import CHANNELS, key_channels
from llmc.codegen.triton.kernels.compaction.row_parts import joined_moments, joined_parts, part_of_rows
from llmc.codegen.triton.kernels.compaction.turned_means import lane_channels, turn_means
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.graph.refusal import Refusal
from llmc.ops.rotate_heads import rotation_block
from llmc.program.launch_arguments import Argument, Operand
from llmc.targets import GpuTarget

_PARTS = 16
_ROWS = 16
_SCORES = 256
_MAX_DIM = 256
_LEAST_DEVIATION = tl.constexpr(1e-6)


@triton.jit
def expected_attention_kernel(
    k_cache_ptr: tl.tensor,
    compaction_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    expected_ptr: tl.tensor,
    moments_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SPREAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    CACHE_GROUP: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    LONGEST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program (s, h): part s of the rows, and the query heads of KV head h. Grid: (PARTS, KV_HEADS).

    weights: [query heads, HEAD_DIM + HALF]. expected: [query heads, LONGEST]. moments: [2, query heads, PARTS], mean
    and sum of squares about it of the part's rows.
    """
    kv_head, part = tl.program_id(1), tl.program_id(0)
    member = tl.arange(0, GROUP_TILE)
    is_head = member < GROUP
    head = kv_head * GROUP + member
    start, end = part_of_rows(compaction_ptr, part, first_free(compaction_ptr, SINKS), RECENT, PARTS, ROWS)
    mean, square = tl.zeros([GROUP_TILE], tl.float32), tl.zeros([GROUP_TILE], tl.float32)
    for tile in tl.range(start, end, ROWS):
        row = tile + tl.arange(0, ROWS)
        present = row < end
        block_and_head = block_of(compaction_ptr, row, present, BLOCK_SIZE) * KV_HEADS + kv_head
        expected = tl.zeros([ROWS, GROUP_TILE], tl.float32)
        for begin in tl.range(0, (HEAD_DIM + 1) // 2, CHANNELS):
            lane = begin + tl.arange(0, CHANNELS)
            is_pair = lane < HALF
            first, second = lane_channels(lane, HALF, INTERLEAVED)
            x = key_channels(
                k_cache_ptr, block_and_head, row % BLOCK_SIZE, present, first,
                HEAD_DIM, SPREAD_BLOCK, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP,
            )  # fmt: skip
            y = key_channels(
                k_cache_ptr, block_and_head, row % BLOCK_SIZE, present, second,
                HEAD_DIM, SPREAD_BLOCK, BLOCK_SIZE, CACHE_FORMAT, CACHE_GROUP,
            )  # fmt: skip
            size = tl.sqrt_rn(x * x + y * y)
            place = weights_ptr + head[None, :] * (HEAD_DIM + HALF)
            of_first = tl.load(place + first[:, None], mask=is_head[None, :] & (first < HEAD_DIM)[:, None], other=0.0)
            of_second = tl.load(
                place + second[:, None], mask=is_head[None, :] & (second < HEAD_DIM)[:, None], other=0.0
            )
            of_size = tl.load(place + HEAD_DIM + lane[:, None], mask=is_head[None, :] & is_pair[:, None], other=0.0)
            expected = tl.dot(x, of_first, expected, input_precision="ieee")
            expected = tl.dot(y, of_second, expected, input_precision="ieee")
            expected = tl.dot(size, of_size, expected, input_precision="ieee")
        mask = present[:, None] & is_head[None, :]
        tl.store(expected_ptr + head[None, :] * LONGEST + row[:, None], expected, mask=mask)
        done = (tile - start).to(tl.float32)
        is_row = present[:, None] & (member >= 0)[None, :]
        mean, square = joined_moments(mean, square, done, expected, is_row)
    tl.store(moments_ptr + head * PARTS + part, mean, mask=is_head)
    tl.store(moments_ptr + (KV_HEADS * GROUP + head) * PARTS + part, square, mask=is_head)


@triton.jit
def largest_expected_kernel(
    compaction_ptr: tl.tensor,
    expected_ptr: tl.tensor,
    moments_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    LONGEST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    SCORES: tl.constexpr,
) -> None:
    """Program (i, h): the i-th SCORES rows of KV head h. Grid: (tiles, KV_HEADS)."""
    kv_head = tl.program_id(1)
    row = tl.program_id(0) * SCORES + tl.arange(0, SCORES)
    free, last = first_free(compaction_ptr, SINKS), tl.load(compaction_ptr) - RECENT
    is_free = (row >= free) & (row < last)
    part = tl.arange(0, PARTS)
    start, end = part_of_rows(compaction_ptr, part, free, RECENT, PARTS, ROWS)
    counts, count = (end - start).to(tl.float32), tl.maximum(last - free, 1).to(tl.float32)
    largest = tl.full([SCORES], float("-inf"), tl.float32)
    for member in tl.range(0, GROUP):
        head = kv_head * GROUP + member
        means = tl.load(moments_ptr + head * PARTS + part)
        squares = tl.load(moments_ptr + (KV_HEADS * GROUP + head) * PARTS + part)
        mean, square = joined_parts(means, squares, counts, count)
        deviation = tl.maximum(tl.sqrt_rn(square / count), _LEAST_DEVIATION)
        expected = tl.load(expected_ptr + head * LONGEST + row, mask=is_free, other=0.0)
        largest = tl.maximum(largest, (expected - mean) / deviation)
    pinned = pinned_rows(compaction_ptr)
    score = tl.where(is_free, largest, tl.where(row < pinned, float("inf"), 0.0))
    tl.store(scores_ptr + kv_head * LONGEST + row, score, mask=row < LONGEST)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """Keys of a float dtype or in codes whose groups fit; up to 256 channels."""
    found, given = refuse_ranks(node, k_cache=(4,), means=(2,), inv_freq=(1,)), arguments_of(node)
    if found is not None:
        return found
    means, inv_freq = (given[name].meta["val"] for name in ("means", "inv_freq"))
    channels = means.shape[1] - inv_freq.shape[0]
    if channels > _MAX_DIM:
        return Refusal(f"heads have {channels} channels; the kernel takes {_MAX_DIM} at most", node)
    if given["cache_format"] is None:
        return refuse_dtypes(node, "k_cache")
    return refuse_format(node, given["cache_format"], channels)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    (heads, width), (kv_heads, block_size, _) = call.shape("means"), call.shape("k_cache")[-3:]
    (half,), group = call.shape("inv_freq"), heads // kv_heads
    numbers: dict[str, Argument] = {"compaction_ptr": call.vector("compaction")}
    between = _Workspaces.of(call, heads, width)
    rows: dict[str, Constant] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "SINKS": int(call.plain("sinks")),
        "RECENT": int(call.plain("recent")),
        "LONGEST": int(call.plain("longest")),
        "PARTS": _PARTS,
        "ROWS": _ROWS,
    }
    read: dict[str, Constant] = {
        "GROUP_TILE": max(16, triton.next_power_of_2(group)),
        "HEAD_DIM": width - half,
        "HALF": half,
        "INTERLEAVED": call.plain("interleaved"),
        "SPREAD_BLOCK": rotation_block(width - half) if call.plain("is_spread") else 0,
        "BLOCK_SIZE": block_size,
        **cache_codes(call),
    }
    expect = DeviceLaunch(
        expected_attention_kernel,
        {"k_cache_ptr": call.cache("k_cache"), **numbers, "weights_ptr": between.weights, **between.of_rows},
        {**rows, **read},
        (str(_PARTS), str(kv_heads)),
        num_stages=1,
    )
    largest = DeviceLaunch(
        largest_expected_kernel,
        {**numbers, **between.of_rows, "scores_ptr": call.result(0).pointer},
        {**rows, "SCORES": _SCORES},
        (str(triton.cdiv(int(call.plain("longest")), _SCORES)), str(kv_heads)),
    )
    return (replace(turn_means(call, between.weights), then=(expect, largest)),)


@dataclass(frozen=True)
class _Workspaces:
    """Numbers that one launch leaves for the next ones."""

    weights: Operand
    expected: Operand
    moments: Operand

    @classmethod
    def of(cls, call: Call, heads: int, width: int) -> "_Workspaces":
        sizes = (("weights", width), ("expected", int(call.plain("longest"))), ("moments", 2 * _PARTS))
        return cls(*(call.workspace(name, 1, heads * size, torch.float32).pointer for name, size in sizes))

    @property
    def of_rows(self) -> dict[str, Argument]:
        return {"expected_ptr": self.expected, "moments_ptr": self.moments}


score_expected = KernelTemplate(torch.ops.llmc.score_expected.default, supports, candidates)

expected_attention_budget = Budget("expected_attention_kernel")
largest_expected_budget = Budget("largest_expected_kernel")
