"""llmc::lora: the adapters' contribution to a product's sums, delta[t] = (x[t]·A[s]ᵀ)·B[s], s the slot of t's adapter.

Two launches, in steps in which a token has an adapter. Tokens are processed in tiles of sixteen. One program per tile
and adapter reads that adapter's A or B once, at its true rank, and skips the other adapters' tokens: a row's sums do
not depend on the rest of the tile. Bound by reading the adapters' matrices, once per tile and adapter. Sums and the
values between the launches are fp32. The delta of tokens without an adapter is undefined and not read.
Source: Chen et al. 2023, "Punica: multi-tenant LoRA serving".
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments, rows
from llmc.codegen.triton.kernels.products.operand_tiles import multiply
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.kernels.rows.norm_rows import norm_launch
from llmc.program import ADAPTERS
from llmc.program.adapter_pools import MOST_PARTS
from llmc.program.launch_arguments import Argument
from llmc.targets import GpuTarget

_TOKENS, _RANK_BLOCK, _OUT_BLOCK = 16, 16, 128


@triton.jit
def lora_shrink_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    lora_a_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    adapters_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    shrunk_row_stride: int,
    tokens: int,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
) -> None:
    """Program (t, p, b): x·Aᵀ of the tokens with t's adapter, of its part p, the b-th RANK_BLOCK of its ranks."""
    part, rank = tl.program_id(1), tl.program_id(2) * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    first_token, adapters, own, is_first = tokens_of_adapter(adapters_ptr, tokens, TOKENS)
    slot = tl.maximum(own - 1, 0)
    ranks = tl.load(ranks_ptr + slot * PARTS + part)
    if is_first & (tl.program_id(2) * RANK_BLOCK < ranks):
        token, channel = tl.arange(0, TOKENS), tl.arange(0, IN_BLOCK)
        has = adapters == own
        x_row = x_ptr + tl.minimum(first_token + token, tokens - 1)[:, None] * x_row_stride
        a_row = lora_a_ptr + ((slot.to(tl.int64) * PARTS + part) * MAX_RANK + rank)[None, :] * IN
        sums = tl.zeros([TOKENS, RANK_BLOCK], dtype=tl.float32)
        for start in range(0, IN, IN_BLOCK):
            inside = start + channel < IN
            x = tl.load(x_row + start + channel[None, :], mask=has[:, None] & inside[None, :], other=0.0)
            a_mask = inside[:, None] & (rank < ranks)[None, :]
            a = tl.load(a_row + start + channel[:, None], mask=a_mask, other=0.0)
            sums = multiply(x, a, sums)
        shrunk = shrunk_ptr + (first_token + token)[:, None] * shrunk_row_stride + (part * MAX_RANK + rank)[None, :]
        tl.store(shrunk, sums, mask=has[:, None] & (rank < ranks)[None, :])


@triton.jit
def lora_expand_kernel(
    shrunk_ptr: tl.tensor,
    shrunk_row_stride: int,
    lora_b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    adapters_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    tokens: int,
    OUT: tl.constexpr,
    END0: tl.constexpr,
    END1: tl.constexpr,
    END2: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
) -> None:
    """Program (t, p, j): of the tokens with t's adapter the j-th OUT_BLOCK columns of part p."""
    part = tl.program_id(1)
    begin = tl.where(part == 0, 0, tl.where(part == 1, END0, tl.where(part == 2, END1, END2)))
    end = tl.where(part == 0, END0, tl.where(part == 1, END1, tl.where(part == 2, END2, OUT)))
    first_token, adapters, own, is_first = tokens_of_adapter(adapters_ptr, tokens, TOKENS)
    first = begin + tl.program_id(2) * OUT_BLOCK
    if is_first & (first < end):
        token, column, rank = tl.arange(0, TOKENS), first + tl.arange(0, OUT_BLOCK), tl.arange(0, RANK_BLOCK)
        has, slot = adapters == own, (own - 1).to(tl.int64)
        ranks = tl.load(ranks_ptr + slot * PARTS + part)
        shrunk = shrunk_ptr + (first_token + token)[:, None] * shrunk_row_stride + part * MAX_RANK
        b = lora_b_ptr + slot * MAX_RANK * OUT + column[None, :]
        sums = tl.zeros([TOKENS, OUT_BLOCK], dtype=tl.float32)
        for start in range(0, ranks, RANK_BLOCK):
            inside = start + rank < ranks
            u = tl.load(shrunk + (start + rank)[None, :], mask=has[:, None] & inside[None, :], other=0.0)
            b_mask = inside[:, None] & (column < end)[None, :]
            w = tl.load(b + (start + rank)[:, None] * OUT, mask=b_mask, other=0.0).to(tl.float32)
            sums = multiply(u, w, sums)
        y = y_ptr + (first_token + token)[:, None] * y_row_stride + column[None, :]
        tl.store(y, sums, mask=has[:, None] & (column < end)[None, :])


@triton.jit
def tokens_of_adapter(
    adapters_ptr: tl.tensor, tokens: int, TOKENS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The tile of TOKENS around the program's own token: its first token, the tokens' adapters, the own token's, and
    whether that has one, and none before it in the tile has the same."""
    tile = tl.program_id(0) // TOKENS
    place = tl.program_id(0) - tile * TOKENS
    first_token, token = tile.to(tl.int64) * TOKENS, tl.arange(0, TOKENS)
    adapters = tl.load(adapters_ptr + first_token + token, mask=token < tokens - first_token, other=0)
    own = tl.sum(tl.where(token == place, adapters, 0))
    first = tl.min(tl.where(adapters == own, token, TOKENS))
    return first_token, adapters, own, (own != 0) & (first == place)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """One way, after the norm that x goes through where the product norms on the way."""
    _, parts, max_rank, channels = call.shape("lora_a")
    ends, norm = call.plain("ends"), call.within("x")
    count = (norm or call).count("x")
    shrunk = rows("shrunk", call.workspace("shrunk", count, parts * max_rank, torch.float32))
    normed = None if norm is None else call.workspace("normed", count, channels, norm.dtype("x"))
    common: dict[str, Argument] = {**shrunk, "ranks_ptr": call.cache("ranks"), "tokens": count}
    x = rows("x", call.rows("x") if normed is None else normed)
    sizes = {"PARTS": parts, "MAX_RANK": max_rank, "TOKENS": _TOKENS, "RANK_BLOCK": _RANK_BLOCK}
    programs = f"cdiv({count}, {_TOKENS}) * {_TOKENS}"
    in_block = min(128 if call.dtype("lora_a").itemsize == 2 else 64, max(16, triton.next_power_of_2(channels)))
    shrink = DeviceLaunch(
        lora_shrink_kernel,
        named_arguments(lora_shrink_kernel, call, **x, **common, lora_a_ptr=call.cache("lora_a")),
        {**sizes, "IN": channels, "IN_BLOCK": in_block},
        (programs, str(parts), str(triton.cdiv(max_rank, _RANK_BLOCK))),
        sides=(ADAPTERS,),
    )
    widths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    padded = [*ends, *[ends[-1]] * (MOST_PARTS - len(ends))]
    expand = DeviceLaunch(
        lora_expand_kernel,
        named_arguments(lora_expand_kernel, call, **common, lora_b_ptr=call.cache("lora_b")),
        {**sizes, "OUT": ends[-1], **{f"END{i}": padded[i] for i in range(MOST_PARTS - 1)}, "OUT_BLOCK": _OUT_BLOCK},
        (programs, str(parts), str(triton.cdiv(max(widths), _OUT_BLOCK))),
        sides=(ADAPTERS,),
    )
    launches: tuple[DeviceLaunch, ...] = (shrink, expand)
    if norm is not None and normed is not None:
        launches = (replace(norm_launch(norm, normed), sides=(ADAPTERS,)), *launches)
    return (replace(launches[0], then=launches[1:]),)


lora = KernelTemplate(
    torch.ops.llmc.lora.default, takes("x[tokens | channels]", typed=("x", "lora_a", "lora_b")), candidates
)
