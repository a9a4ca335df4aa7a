"""llmc::rope: each pair of channels (a, b) of a head becomes (a·cos - b·sin, b·cos + a·sin).

Memory-bound: moves 2·T·H·D elements and T·rotary fp32 angles. A program turns a few heads of one token; it reads every
pair before it writes it and touches no other program's heads, so the result may lie where x lay.
"""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.targets import GpuTarget

PAIRS_PER_PROGRAM = 512


@triton.jit
def rope_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    """Program (t, j) turns the j-th HEAD_BLOCK heads of token t."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    source = x_ptr + token * x_row_stride + head[:, None] * HEAD_DIM
    destination = y_ptr + token * y_row_stride + head[:, None] * HEAD_DIM
    is_head = (head < HEADS)[:, None]
    turn(source, destination, is_head, token, cos_ptr, sin_ptr, HEAD_DIM, HALF, INTERLEAVED)


@triton.jit
def turn(
    source: tl.tensor,
    destination: tl.tensor,
    is_head: tl.tensor,
    token: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Turn the heads at `source`: [heads, 1] pointers, in fp32, and pass the channels from 2·HALF on unchanged. Which
    product is fused into the sum is written out, so that `turned` has the same bits."""
    pair = tl.arange(0, triton.next_power_of_2(HALF))
    is_pair = pair < HALF
    first = (2 * pair if INTERLEAVED else pair)[None, :]
    second = (2 * pair + 1 if INTERLEAVED else pair + HALF)[None, :]
    inside = is_head & is_pair[None, :]
    cos = tl.load(cos_ptr + token * HALF + pair, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pair, mask=is_pair, other=0.0)[None, :]
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(destination + first, tl.fma(a, cos, -(b * sin)).to(destination.dtype.element_ty), mask=inside)
    tl.store(destination + second, tl.fma(b, cos, a * sin).to(destination.dtype.element_ty), mask=inside)
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, triton.next_power_of_2(REST))
        inside = is_head & (rest < HEAD_DIM)[None, :]
        values = tl.load(source + rest[None, :], mask=inside, other=0.0)
        tl.store(destination + rest[None, :], values.to(destination.dtype.element_ty), mask=inside)


@triton.jit
def turned(
    source: tl.tensor,
    is_head: tl.tensor,
    token: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """Return the heads at `source` turned, before `turn` rounds them: [heads, TILE], fp32, zero from HEAD_DIM on."""
    dims = tl.arange(0, TILE)
    if INTERLEAVED:
        is_first, pair, other = dims % 2 == 0, dims // 2, dims ^ 1
    else:
        is_first = dims < HALF
        pair = tl.where(is_first, dims, dims - HALF)
        other = tl.where(is_first, dims + HALF, dims - HALF)
    in_pair = dims < 2 * HALF
    cos = tl.load(cos_ptr + token * HALF + pair, mask=in_pair, other=1.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pair, mask=in_pair, other=0.0)[None, :]
    own = tl.load(source + dims[None, :], mask=is_head & (dims < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
    across = tl.load(source + other[None, :], mask=is_head & in_pair[None, :], other=0.0).to(tl.float32)
    return tl.fma(own, cos, across * tl.where(is_first[None, :], -sin, sin))


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    heads, head_dim = call.shape("x")
    (half,) = call.shape("cos")
    constants = rotation_constants(heads, head_dim, half, call.plain("interleaved"))
    grid = (str(call.count("x")), str(triton.cdiv(heads, constants["HEAD_BLOCK"])))
    return (DeviceLaunch(rope_kernel, named_arguments(rope_kernel, call), constants, grid),)


def rotation_constants(heads: int, head_dim: int, half: int, interleaved: bool) -> dict[str, int]:
    """The constants of a kernel that turns heads, a few in a program."""
    block = min(triton.next_power_of_2(heads), max(1, PAIRS_PER_PROGRAM // triton.next_power_of_2(half)))
    return {"HEADS": heads, "HEAD_DIM": head_dim, "HALF": half, "INTERLEAVED": interleaved, "HEAD_BLOCK": block}


rope = KernelTemplate(
    torch.ops.llmc.rope.default, takes("x[tokens | heads head_dim]"), candidates, in_place=(("x", 0),)
)

rope_budget = Budget("rope_kernel")
