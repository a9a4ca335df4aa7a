"""llmc::attention over one whole sequence, and the arithmetic that llmc::paged_attention shares with it.

Source of the softmax with sinks: Xiao et al. 2023 in the learned form of gpt-oss; of softcap: Gemma 2; of slopes:
Press et al. 2022, "Train Short, Test Long" (ALiBi); of chunks: Llama 4; of a bias by distance
that follows from the query: Shaw et al. 2018 in the form of Inkling; of latents: DeepSeek-AI 2024, "DeepSeek-V2".
"""

from typing import Any

import sympy
import torch
from torch import Tensor

from llmc.graph.op_record import A, OpCall, visible_to
from llmc.ops.registry import WHOLE_SEQUENCE, op
from llmc.program import CachePolicy


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_position: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    latent: bool = False,
    bias: Tensor | None = None,
    chosen: Tensor | None = None,
    pinned: int | None = None,
) -> Tensor:
    """Causal attention in fp32 of queries at positions first_position…, over keys from position 0.

    q: [queries, heads, head_dim]; k, v: [keys, kv_heads, head_dim].

    Query head h reads KV head h // (heads / kv_heads). window: a query sees the last `window` positions, itself
    included. softcap: scores become softcap·tanh(score / softcap). sinks: [heads] or [queries, heads], one extra logit
    per head, which takes probability and adds nothing. slopes: [heads], subtracted from a score per position of
    distance, after the cap. chunk: a query sees no key before the multiple of `chunk` at or before its own position.
    latent: values are also read as keys: a key is its row of k followed by its row of v, and q has the sum of their
    channels. bias: [queries, heads, extent], added to the score of the key 0, 1, … extent - 1 positions back, after the
    cap. chosen: [queries, count], int32, the places of all keys that a query may see, in order (llmc::choose_keys).
    pinned: keys before this position are visible regardless of window and chunk. Returns [queries, heads, value_dim],
    fp32.
    """
    group = q.shape[1] // k.shape[1]
    keys = (torch.cat((k, v), dim=-1) if latent else k).float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query_positions = first_position + torch.arange(q.shape[0], device=q.device)[:, None]
    key_positions = torch.arange(k.shape[0], device=q.device)[None, :]
    if slopes is not None:
        scores = scores + slopes.float()[:, None, None] * (key_positions - query_positions)
    if bias is not None:
        back = (query_positions - key_positions).clamp(0, bias.shape[2])
        nothing = bias.new_zeros((*bias.shape[:2], 1))
        by_distance = torch.cat((bias, nothing), dim=-1).float().transpose(0, 1)
        scores = scores + by_distance.gather(-1, back.expand(by_distance.shape[0], -1, -1))
    visible = _visible(query_positions, key_positions, window, chunk, chosen, pinned)
    scores = scores.masked_fill(~visible, float("-inf"))
    # Behind a window may be what another sequence has left there, and zero times what is not finite is not zero.
    values = values.masked_fill(~visible.any(0)[:, None, None], 0.0)
    if sinks is not None:
        sink = sinks.float().expand(q.shape[0], -1).t()[..., None]
        probabilities = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", probabilities, values)


def _visible(
    own: Tensor, keys: Tensor, window: int | None, chunk: int | None, chosen: Tensor | None, pinned: int | None
) -> Tensor:
    """Whether a query sees a key, [queries, keys]. own: [queries, 1], keys: [1, keys], positions."""
    before = visible = keys <= own
    if window is not None:
        visible = visible & (keys > own - window)
    if chunk is not None:
        visible = visible & (keys >= own - own % chunk)
    if pinned is not None:
        visible = visible | (before & (keys < pinned))
    if chosen is not None:
        marked = visible.new_zeros((own.shape[0], keys.shape[1] + 1))
        visible = visible & marked.scatter_(1, chosen.long().clamp(max=keys.shape[1]), True)[:, :-1]
    return visible


def heads_fit(call: OpCall) -> str | None:
    q, k, v = call.shape("q"), call.shape("k"), call.shape("v")
    if not len(q) == len(k) == len(v) == 3:
        return f"attention needs [tokens, heads, head_dim], got q {q}, k {k}, v {v}"
    key = k[2] + v[2] if call.arguments.get("latent") else k[2]
    if q[1] % k[1] != 0 or k[1] != v[1] or q[2] != key:
        return f"the heads do not fit: q {q}, k {k}, v {v}"
    if (keeps := call.arguments.get("keeps")) is not None:
        beside = [name for name in ("window", "chunk", "chosen") if call.arguments[name] is not None]
        if beside:
            return f"keeps={keeps!r} limits what a query sees, and so does {beside[0]}"
        try:
            CachePolicy.from_text(keeps)
        except ValueError as error:
            return str(error)
    if call.arguments.get("bias") is not None and (len(bias := call.shape("bias")) != 3 or bias[1] != q[1]):
        return f"a bias {bias} is not [tokens, {q[1]} heads, extent]"
    return None


def attended(a: Any) -> Any:
    """The fake result: q's rows and heads, with v's channels."""
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.v.shape[2]))


def attention_flops(call: OpCall) -> sympy.Expr:
    """FLOPs of scores and weighted sums, over all pairs of a query and a key that it sees."""
    tokens, heads, head_dim = call.sizes("q")
    seen, value_dim = visible_to(call.arguments).most, call.size(call.result.shape[2])
    return 2 * heads * (head_dim + value_dim) * (A if seen is None else sympy.Min(A, seen * tokens))


@op(
    fake=attended,
    stages=WHOLE_SEQUENCE,
    flops=attention_flops,
    check=heads_fit,
    fallback="paged_attention",
    axes="q[t g*h d!] k[t g d!] v[t g e!] sinks[g*h] slopes[g*h] bias[t g*h n!] -> [t g*h e!]",
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    latent: bool = False,
    bias: Tensor | None = None,
    chosen: Tensor | None = None,
    keeps: str | None = None,
) -> Tensor:
    """Causal self-attention of one sequence. q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim].

    Options as in `attend`; keeps: a CachePolicy as text, which says what a query sees in the place of window, chunk and
    chosen. Returns [tokens, heads, value_dim] in q's dtype.
    """
    if keeps is not None:
        chosen = _seen_under(CachePolicy.from_text(keeps), q)
    out = attend(q, k, v, 0, scale, window, softcap, sinks, slopes, chunk, latent, bias, chosen)
    return out.to(q.dtype).contiguous()


def _seen_under(policy: CachePolicy, q: Tensor) -> Tensor:
    """The positions that each query sees, as `chosen` has them: [queries, most], int32."""
    seen = [torch.tensor(positions, dtype=torch.int32, device=q.device) for positions in policy.seen(q.shape[0])]
    return torch.nn.utils.rnn.pad_sequence(seen, batch_first=True, padding_value=q.shape[0])
