"""llmc::ragged_attention: y[t, h] = Σ_j softmax_j(q[t, h]·k[j, h / GROUP]·scale) v[j, h / GROUP], j of t's text.

Keys and values are the step's own rows. A text's tiles begin at its first token, so its sums have one order in any
company. Source: Dao 2023, "FlashAttention-2".
"""

import torch
import triton
import triton.language as tl
from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.attention.attend_keys import LOG2E, LOWEST, read_queries
from llmc.codegen.triton.kernels.attention.attention_tiles import Tile, prefill_tiles
from llmc.codegen.triton.kernels.attention.paged_prefill import request_of
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks, tensors_of
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Count
from llmc.targets import GpuTarget

_MAX_DIM = 256


@triton.jit
def ragged_attention_kernel(
    q_ptr: tl.tensor,
    q_row_stride: int,
    k_ptr: tl.tensor,
    k_row_stride: int,
    v_ptr: tl.tensor,
    v_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    query_starts_ptr: tl.tensor,
    requests: int,
    scale: float,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
) -> None:
    """Program (h, i): head h of QUERY_TILE tokens of one text. Grid: (heads, cdiv(T, QUERY_TILE) + R)."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    text = request_of(query_starts_ptr, tile, requests, QUERY_TILE)
    first = tl.load(query_starts_ptr + text)
    end = tl.load(query_starts_ptr + text + 1)
    first_query = first + (tile - first // QUERY_TILE - text) * QUERY_TILE
    if first_query >= end:
        return
    query = first_query + tl.arange(0, QUERY_TILE)
    row = query.to(tl.int64)
    q = read_queries(q_ptr + row * q_row_stride + head * HEAD_DIM, query < end, HEAD_DIM, DIM_TILE)
    row_max = tl.full([QUERY_TILE], LOWEST, tl.float32)
    row_sum = tl.zeros([QUERY_TILE], tl.float32)
    weighted = tl.zeros([QUERY_TILE, VALUE_TILE], tl.float32)
    exponent_scale = (SOFTCAP if SOFTCAP > 0 else scale) * LOG2E
    start = first
    stop = end
    if WINDOW > 0:
        start = first + tl.maximum(first_query - WINDOW + 1 - first, 0) // KEY_TILE * KEY_TILE
        stop = tl.minimum(first_query + QUERY_TILE - 1 + WINDOW, end)
    for begin in tl.range(start, stop, KEY_TILE):
        key = begin + tl.arange(0, KEY_TILE)
        k = _rows(k_ptr + head // GROUP * HEAD_DIM, k_row_stride, key, end, HEAD_DIM, DIM_TILE)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (1 + exp(2x)), right at both infinities.
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * (2.0 * LOG2E / SOFTCAP))))
        visible = (key < end)[None, :]
        if WINDOW > 0:
            apart = query[:, None] - key[None, :]
            visible = visible & (apart < WINDOW) & (apart > -WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * exponent_scale)
        weights = tl.exp2(scores * exponent_scale - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        v = _rows(v_ptr + head // GROUP * VALUE_DIM, v_row_stride, key, end, VALUE_DIM, VALUE_TILE)
        weighted = tl.dot(weights.to(q.dtype), v.to(q.dtype), weighted * shrink[:, None], input_precision="ieee")
        row_max = new_max
    dims = tl.arange(0, VALUE_TILE)
    y_ptrs = y_ptr + row[:, None] * y_row_stride + head * VALUE_DIM + dims[None, :]
    y = weighted / row_sum[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(query < end)[:, None] & (dims[None, :] < VALUE_DIM))


@triton.jit
def _rows(
    ptr: tl.tensor, row_stride: int, key: tl.tensor, end: tl.tensor, DIM: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """[keys, TILE], with zeros behind the text and the head's channels."""
    dims = tl.arange(0, TILE)
    ptrs = ptr + key.to(tl.int64)[:, None] * row_stride + dims[None, :]
    return tl.load(ptrs, mask=(key < end)[:, None] & (dims[None, :] < DIM), other=0.0)


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """q, k, v: [tokens, heads, dim] of one float dtype, heads of up to 256 channels."""
    refused = refuse_dtypes(node, "q", "k", "v") or refuse_ranks(node, q=(3,), k=(3,), v=(3,))
    if refused is not None:
        return refused
    for name in ("q", "v"):
        if (dim := tensors_of(node)[name].shape[2]) > _MAX_DIM:
            return Refusal(f"a head of {name} has {dim} channels; the kernel takes {_MAX_DIM} at most", node)
    scale = arguments_of(node)["scale"]
    return None if scale > 0 else Refusal(f"scale is {scale}: the running maximum needs a positive one", node)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return a launch for each of prefill's tiles."""
    (heads, head_dim), (kv_heads, value_dim) = call.shape("q"), call.shape("v")
    dim_tile, value_tile = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    scale = float(call.plain("scale"))
    arguments = named_arguments(ragged_attention_kernel, call, requests=Count.REQUESTS, scale=scale)
    constants = {
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "WINDOW": call.plain("window") or 0,
        "SOFTCAP": float(call.plain("softcap") or 0.0),
        "DIM_TILE": dim_tile,
        "VALUE_TILE": value_tile,
    }

    def launch(tile: Tile) -> DeviceLaunch:
        sizes = {"QUERY_TILE": tile.rows, "KEY_TILE": tile.keys}
        grid = (str(heads), f"cdiv({call.count('q')}, {tile.rows}) + R")
        return DeviceLaunch(
            ragged_attention_kernel, arguments, {**constants, **sizes}, grid, tile.num_warps, tile.num_stages
        )

    is_padded = (head_dim, value_dim) != (dim_tile, value_tile)
    is_fp32 = call.dtype("q") is torch.float32
    tiles = prefill_tiles(target, is_fp32, max(dim_tile, value_tile), is_padded=is_padded, is_coded=False)
    return tuple(launch(tile) for tile in tiles)


ragged_attention = KernelTemplate(torch.ops.llmc.ragged_attention.default, supports, candidates)
