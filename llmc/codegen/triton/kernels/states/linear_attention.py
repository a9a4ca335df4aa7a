"""llmc::linear_attention_with_state: S ← diag(exp(decay))·S, then S ← S + kᵀ·v or, with beta, S + kᵀ·(beta·(v - k·S));
y = q·S.

Columns of S are independent: a program takes a few of one head's, of one request, through all tokens, in registers; the
next tokens are on their way meanwhile. Moves 8·R·H·K·V bytes of states, and q and k for each program.
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.refusals import refuse_ranks, tensors_of
from llmc.codegen.triton.kernels.states.carried import carried
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Count
from llmc.targets import GpuTarget

# Elements of a state in a warp's registers; and the least columns, one memory transaction.
_ELEMENTS = 1024
_LEAST_COLUMNS = 8
WIDEST_KEY = 2048


@triton.jit
def linear_attention_kernel(
    q_ptr: tl.tensor,
    q_row_stride: int,
    k_ptr: tl.tensor,
    k_row_stride: int,
    v_ptr: tl.tensor,
    v_row_stride: int,
    decay_ptr: tl.tensor,
    decay_row_stride: int,
    beta_ptr: tl.tensor,
    beta_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    state_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    state_slots_ptr: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
) -> None:
    """Program (j, h, r): the j-th VALUE_BLOCK columns of head h's state, of request r.

    BY_CHANNEL: each channel of a key has its own decay.
    """
    head = tl.program_id(1)
    first, end, slot, earlier = carried(tl.program_id(2), query_starts_ptr, context_lens_ptr, state_slots_ptr)
    key = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    value = tl.program_id(0) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    keyed, valued = key < KEY_DIM, value < VALUE_DIM
    held = keyed[:, None] & valued[None, :]
    state_ptrs = state_ptr + (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    state = tl.load(state_ptrs, mask=held & (value < tl.where(earlier > 0, VALUE_DIM, 0))[None, :], other=0.0)
    keys = head // (HEADS // GROUPS) * KEY_DIM + key
    row = first.to(tl.int64)
    for _ in tl.range(first, end, num_stages=3):
        q = tl.load(q_ptr + row * q_row_stride + keys, mask=keyed, other=0.0)
        k = tl.load(k_ptr + row * k_row_stride + keys, mask=keyed, other=0.0)
        added = tl.load(v_ptr + row * v_row_stride + head * VALUE_DIM + value, mask=valued, other=0.0)
        if BY_CHANNEL:
            decays = tl.load(decay_ptr + row * decay_row_stride + head * KEY_DIM + key, mask=keyed, other=0.0)
            state *= tl.exp(decays)[:, None]
        else:
            state *= tl.exp(tl.load(decay_ptr + row * decay_row_stride + head))
        if beta_ptr is not None:
            found = sum_of_products(k[:, None], state, 0)
            added = tl.load(beta_ptr + row * beta_row_stride + head) * (added - found)
        state += k[:, None] * added[None, :]
        y = sum_of_products(q[:, None], state, 0)
        tl.store(y_ptr + row * y_row_stride + head * VALUE_DIM + value, y, mask=valued)
        row += 1
    tl.store(state_ptrs, state, mask=held)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """k: [tokens, groups, key_dim], v: [tokens, heads, value_dim], with columns that a program's registers hold."""
    refused = refuse_ranks(node, k=(3,), v=(3,))
    width = tensors_of(node)["k"].shape[-1]
    if refused is None and width > WIDEST_KEY:
        return Refusal(f"keys have {width} channels; the kernel takes {WIDEST_KEY} at most", node)
    return refused


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return the single way: one launch."""
    (groups, key_dim), (heads, value_dim) = call.shape("k"), call.shape("v")
    key_block = triton.next_power_of_2(key_dim)
    value_block = min(triton.next_power_of_2(value_dim), max(_LEAST_COLUMNS, _ELEMENTS // key_block))
    arguments = named_arguments(linear_attention_kernel, call, state_ptr=call.state("state"))
    constants = {
        "HEADS": heads,
        "GROUPS": groups,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BY_CHANNEL": len(call.shape("decay")) == 2,
        "VALUE_BLOCK": value_block,
    }
    grid = (str(triton.cdiv(value_dim, value_block)), str(heads), str(Count.REQUESTS))
    warps = max(1, key_block * value_block // _ELEMENTS)
    return (DeviceLaunch(linear_attention_kernel, arguments, constants, grid, num_warps=warps),)


linear_attention = KernelTemplate(torch.ops.llmc.linear_attention_with_state.default, supports, candidates)
