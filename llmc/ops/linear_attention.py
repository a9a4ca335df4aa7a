"""llmc::linear_attention, llmc::linear_attention_with_state — attention with keys and values summed up in a matrix.

    S ← diag(exp(decay[t]))·S;    S ← S + k[t]ᵀ·v[t]    or, with beta,    S ← S + k[t]ᵀ·(beta[t]·(v[t] - k[t]·S))
    y[t] = q[t]·S

of each head by itself; beta makes it the delta rule. Mamba 2 is the first form: k is B, q is C, v is dt·x and decay is
dt·A. The gated delta net is the second, with one decay a head; Kimi's delta attention has one for each channel of a
key. Named after ONNX's LinearAttention; these are its update rules gated and gated_delta. Sources:
Katharopoulos et al. 2020; Dao and Gu 2024, "Transformers are SSMs"; Yang et al. 2024, "Gated Delta Networks".
"""

from typing import Any

import sympy
import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_SERVING, UNTIL_SERVING, like, op
from llmc.ops.states import check_floats, scan_step


def _check(call: OpCall) -> str | None:
    q, k, v, decay, beta = (call.shape(name) for name in ("q", "k", "v", "decay", "beta"))
    if not (len(q) == len(v) == 3 and q == k and v[1] % k[1] == 0):
        return f"q {q}, k {k} and v {v} are not [tokens, groups, key_dim] twice and [tokens, heads, value_dim]"
    if decay[1:] not in ([v[1]], [v[1], k[2]]) or beta[1:] not in ([], [v[1]]):
        return f"decay {decay} and beta {beta} are not those of {v[1]} heads with keys of {k[2]}"
    return check_floats(call, ("q", "k", "v", "decay", "beta"))


def _flops(call: OpCall) -> sympy.Expr:
    rule = 5 if call.arguments["beta"] is None else 7
    return rule * call.elements() * call.arguments["k"].shape[2]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """state: [heads, key_dim, value_dim]."""
    heads = v.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    kept = torch.exp(decay).reshape(*decay.shape[:2], -1, 1)
    y = torch.empty_like(v)
    for t in range(v.shape[0]):
        state = kept[t] * state
        added = v[t]
        if beta is not None:
            added = beta[t, :, None] * (added - (k[t, :, :, None] * state).sum(1))
        state = state + k[t, :, :, None] * added[:, None]
        y[t] = (q[t, :, :, None] * state).sum(1)
    return y, state


@op(fake=like("v"), stages=UNTIL_SERVING, flops=_flops, check=_check, fallback="states")
def linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
    """The attention of one sequence. q, k: [tokens, groups, key_dim]; v: [tokens, heads, value_dim], head h reading
    group h // (heads / groups); decay: [tokens, heads] or [tokens, heads, key_dim], logarithms; beta: [tokens, heads];
    all fp32. Returns [tokens, heads, value_dim].
    """
    state = v.new_zeros((v.shape[1], k.shape[2], v.shape[2]))
    return _attend(q, k, v, decay, beta, state)[0]


@op(fake=like("v"), stages=FROM_SERVING, flops=_flops, check=_check, writes=("state",))
def linear_attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """The attention in a step. state: [slots, heads, key_dim, value_dim]; the rest as in linear_attention and scan_step
    (ops/states.py)."""

    def scan(tokens: slice, before: Tensor) -> tuple[Any, Any]:
        betas = None if beta is None else beta[tokens]
        return _attend(q[tokens], k[tokens], v[tokens], decay[tokens], betas, before)

    return scan_step(scan, torch.zeros_like(v), state, query_starts, context_lens, state_slots)
