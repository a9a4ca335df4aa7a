"""llmc::head_linear: y[t, h] = x[t, h]·weight[h]ᵀ, a product of its own for each head.

Memory-bound for few tokens: moves the weights once for each TOKEN_BLOCK of them; 2·T·H·IN·OUT operations.
"""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.products.operand_tiles import multiply, read_tile
from llmc.codegen.triton.kernels.refusals import takes
from llmc.program import Layout
from llmc.targets import GpuTarget


@triton.jit
def head_linear_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    tokens: int,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
) -> None:
    """Program (h, o, t): a tile [TOKEN_BLOCK, OUT_BLOCK] of head h. Grid: (heads, cdiv(OUT, …), cdiv(T, …))."""
    head = tl.program_id(0)
    token = tl.program_id(2) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    out = tl.program_id(1) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    # Rows past the end repeat the last one, so that no load needs a mask for them.
    x_row = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * x_row_stride + head * IN
    weight_row = weight_ptr + (head.to(tl.int64) * OUT + tl.minimum(out, OUT - 1))[None, :] * IN
    product = tl.zeros([TOKEN_BLOCK, OUT_BLOCK], dtype=tl.float32)
    for start in range(0, IN, IN_BLOCK):
        channel = start + tl.arange(0, IN_BLOCK)
        x = read_tile(x_row + channel[None, :], (channel < IN)[None, :], IN % IN_BLOCK != 0)
        w = read_tile(weight_row + channel[:, None], (channel < IN)[:, None], IN % IN_BLOCK != 0)
        product = multiply(x, w, product)
    y_ptrs = y_ptr + token.to(tl.int64)[:, None] * y_row_stride + head * OUT + out[None, :]
    inside = (token < tokens)[:, None] & (out < OUT)[None, :]
    tl.store(y_ptrs, product.to(y_ptr.dtype.element_ty), mask=inside)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Tiles of 16 tokens for short steps, of 64 for others; a token's sums are the same in both."""
    heads, out, channels = call.shape("weight")
    in_block, out_block = (max(16, min(64, triton.next_power_of_2(size))) for size in (channels, out))
    weight = call.weight("weight", Layout.ROWS)
    arguments = named_arguments(head_linear_kernel, call, weight_ptr=weight, tokens=call.count("x"))

    def launch(tokens: int, first: int, last: int | None) -> DeviceLaunch:
        return DeviceLaunch(
            head_linear_kernel,
            arguments,
            {"IN": channels, "OUT": out, "TOKEN_BLOCK": tokens, "OUT_BLOCK": out_block, "IN_BLOCK": in_block},
            (str(heads), str(triton.cdiv(out, out_block)), f"cdiv({call.count('x')}, {tokens})"),
            min_tokens=first,
            max_tokens=last,
        )

    return launch(16, 1, 32), launch(64, 33, None)


head_linear = KernelTemplate(
    torch.ops.llmc.head_linear.default,
    takes("x[tokens | heads in] weight[heads out in]", typed=("x", "weight")),
    candidates,
)
