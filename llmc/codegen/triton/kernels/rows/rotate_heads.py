"""llmc::rotate_heads: each head's channels times an orthonormal Hadamard matrix, block by block.

Memory-bound: moves 2·T·H·D elements. A program rotates a few heads of one token in log2(block) steps, each of which
makes (a + b, a - b) of pairs that lie ever farther apart; it reads its heads before it writes them.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.graph.refusal import Refusal
from llmc.ops.rotate_heads import rotation_block
from llmc.targets import GpuTarget

_CHANNELS_PER_PROGRAM = 1024
_WIDEST_HEAD = 1024


@triton.jit
def rotate_heads_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_STEPS: tl.constexpr,
    REST_STEPS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    """Program (t, j) rotates the j-th HEAD_BLOCK heads of token t. FIRST_STEPS, REST_STEPS: per part's blocks."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    source = x_ptr + token * x_row_stride + head[:, None] * HEAD_DIM
    destination = y_ptr + token * y_row_stride + head[:, None] * HEAD_DIM
    is_head = (head < HEADS)[:, None]
    rotate_part(source, destination, is_head, FIRST, FIRST_STEPS, HEAD_BLOCK)
    if FIRST < HEAD_DIM:
        rotate_part(source + FIRST, destination + FIRST, is_head, HEAD_DIM - FIRST, REST_STEPS, HEAD_BLOCK)


@triton.jit
def rotate_part(
    source: tl.tensor,
    destination: tl.tensor,
    is_head: tl.tensor,
    CHANNELS: tl.constexpr,
    STEPS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    """Rotate CHANNELS channels of each head at `source`: [heads, 1] pointers, in fp32, in blocks of 2^STEPS."""
    TILE: tl.constexpr = triton.next_power_of_2(CHANNELS)
    channel = tl.arange(0, TILE)[None, :]
    inside = is_head & (channel < CHANNELS)
    x = tl.load(source + channel, mask=inside, other=0.0).to(tl.float32)
    for step in tl.static_range(STEPS):
        # Half of a pair of runs is 2^step channels; a constexpr cannot be assigned in an unrolled loop.
        pairs = x.reshape(HEAD_BLOCK * TILE // (2 << step), 2, 1 << step).permute(0, 2, 1)
        a, b = tl.split(pairs)
        x = tl.join(a + b, a - b).permute(0, 2, 1).reshape(HEAD_BLOCK, TILE)
    FACTOR: tl.constexpr = 2.0 ** (-0.5 * STEPS)
    tl.store(destination + channel, (x * FACTOR).to(destination.dtype.element_ty), mask=inside)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [tokens, heads, channels] of a float dtype."""
    found = takes("x[tokens | heads head_dim]")(node, target)
    channels = arguments_of(node)["x"].meta["val"].shape[-1]
    if found is None and channels > _WIDEST_HEAD:
        return Refusal(f"heads have {channels} channels; a program rotates {_WIDEST_HEAD} at most", node)
    return found


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    heads, head_dim = call.shape("x")
    first = call.plain("first")
    block = min(triton.next_power_of_2(heads), max(1, _CHANNELS_PER_PROGRAM // triton.next_power_of_2(head_dim)))
    constants = {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "FIRST": first,
        "FIRST_STEPS": rotation_block(first).bit_length() - 1,
        "REST_STEPS": max(1, rotation_block(head_dim - first)).bit_length() - 1,
        "HEAD_BLOCK": block,
    }
    grid = (str(call.count("x")), str(triton.cdiv(heads, block)))
    return (DeviceLaunch(rotate_heads_kernel, named_arguments(rotate_heads_kernel, call), constants, grid),)


rotate_heads = KernelTemplate(torch.ops.llmc.rotate_heads.default, supports, candidates, in_place=(("x", 0),))

rotate_heads_budget = Budget("rotate_heads_kernel")
