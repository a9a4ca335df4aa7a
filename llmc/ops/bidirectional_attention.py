"""llmc::bidirectional_attention — every token of a text sees every other; llmc::ragged_attention, of a step's texts.

No keys are kept: all of a text's tokens are in one step. Source: Devlin et al. 2018, "BERT"; of windows that reach to
both sides: Warner et al. 2024, "ModernBERT".
"""

from itertools import pairwise

import sympy
import torch
from torch import Tensor

from llmc.graph.op_record import A, OpCall
from llmc.ops.attention import attended, heads_fit
from llmc.ops.registry import FROM_SERVING, UNTIL_SERVING, op


def attend_both_ways(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention without a causal mask.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim] of the same tokens. window: a query
    sees the keys nearer than that, on both sides. softcap: scores become softcap·tanh(score / softcap). Returns fp32.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        places = torch.arange(q.shape[0], device=q.device)
        scores = scores.masked_fill((places[:, None] - places[None, :]).abs() >= window, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def _flops(call: OpCall) -> sympy.Expr:
    """FLOPs of scores and weighted sums: n · n pairs for a text of n tokens, about twice the causal number."""
    tokens, heads, head_dim = call.sizes("q")
    value_dim, window = call.size(call.result.shape[2]), call.arguments["window"]
    pairs = 2 * A - tokens
    return (
        2 * heads * (head_dim + value_dim) * (pairs if window is None else sympy.Min(pairs, (2 * window - 1) * tokens))
    )


@op(
    fake=attended,
    stages=UNTIL_SERVING,
    flops=_flops,
    check=heads_fit,
    axes="q[t g*h d!] k[t g d!] v[t g e!] -> [t g*h e!]",
)
def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Self-attention of one text without a causal mask. q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, …].

    Options as in `attend_both_ways`; returns [tokens, heads, value_dim] in q's dtype.
    """
    return attend_both_ways(q, k, v, scale, window, softcap).to(q.dtype).contiguous()


@op(fake=attended, stages=FROM_SERVING, flops=_flops, check=heads_fit)
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`bidirectional_attention` of several texts, whose tokens are concatenated. query_starts: int32; text r has the
    tokens query_starts[r]:query_starts[r + 1]."""
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    starts = query_starts.tolist()
    for begin, end in pairwise(starts):
        rows = slice(begin, end)
        out[rows] = attend_both_ways(q[rows], k[rows], v[rows], scale, window, softcap).to(q.dtype)
    return out
