"""Recurrences of transformers' older recurrent models, implemented in methods of their modules, as llmc:: ops.

RWKV and the mLSTM keep sums of exponentials in range by the running maximum of exponents: a tropical linear_recurrence.
The remaining arithmetic is per token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, sigmoid, silu, softplus

_llmc = torch.ops.llmc


def rwkv_linear_attention(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: None = None,
    return_state: bool = False,
) -> tuple[Tensor, None]:
    """RWKV's attention, as scans over tokens.

    time_decay, time_first: [channels]; key, value: [1, T, channels]. Returns [1, T, channels] in key's dtype.
    """
    k, v = key.squeeze(0).float(), value.squeeze(0).float()
    decay = torch.zeros_like(k) - torch.exp(time_decay.float())
    running = _llmc.linear_recurrence.default(k, decay, -1e38, True)
    most = torch.maximum(running + decay, k)
    kept, added = torch.exp(running + decay - most), torch.exp(k - most)
    numerator = _llmc.linear_recurrence.default(added * v, kept)
    denominator = _llmc.linear_recurrence.default(added, kept)
    # A token counts more for itself than for those after it.
    own = k + time_first.float()
    most = torch.maximum(running, own)
    kept, added = torch.exp(running - most), torch.exp(own - most)
    y = (kept * numerator + added * v) / (kept * denominator + added)
    return y.to(key.dtype).unsqueeze(0), None


def mlstm(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """xLSTM's matrix memory, as scans over tokens.

    query, key: [1, heads, T, key_dim]; value: [1, heads, T, value_dim]; igate, fgate: [1, heads, T]. Returns [1,
    heads, T, value_dim].
    """
    q, k, v = (tensor.squeeze(0).transpose(0, 1).float() for tensor in (query, key, value))
    added, kept = igate.squeeze(0).t().float(), -softplus(-fgate.squeeze(0).t().float())
    running = _llmc.linear_recurrence.default(added, kept, 0.0, True)
    most = torch.maximum(running + kept, added)
    scaled = k * torch.exp(added - most).unsqueeze(-1)
    # The normalizer is one more column of values, of ones.
    values = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    y = _llmc.linear_attention.default(q * q.shape[-1] ** -0.5, scaled, values, running + kept - most)
    norm = torch.maximum(y[..., -1:].abs(), torch.exp(-most).unsqueeze(-1)) + self.config.eps
    return (y[..., :-1] / norm).to(query.dtype).transpose(0, 1).unsqueeze(0), None


def rg_lru(
    self: Any, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: None, **options: Any
) -> tuple[Tensor, None]:
    """The recurrence of RecurrentGemma, as a scan over tokens.

    hidden_states, recurrent_gate: [1, T, channels]. A sequence begins at position 0, so `reset` says nothing new.
    Returns [1, T, channels].
    """
    x, decay = hidden_states.squeeze(0).float(), recurrent_gate.squeeze(0).float()
    y = decay * _llmc.linear_recurrence.default(x, decay) + x
    return y.to(hidden_states.dtype).unsqueeze(0), None


def lightning_attention(
    self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """The attention of a MiniMax layer, whose heads have individual decay rates. hidden_states: [1, T, hidden]; returns
    the same."""
    qkv = self.act_fn(self.qkv_proj(hidden_states)).squeeze(0)
    heads = qkv.reshape(-1, self.num_attention_heads, 3 * self.head_dim).float()
    q, k, v = heads.split(self.head_dim, -1)
    decay = torch.zeros_like(q[..., 0]) - self.slope_rate.float().reshape(-1)
    y = _llmc.linear_attention.default(q, k, v, decay).to(hidden_states.dtype)
    normed = self.norm(y.reshape(1, -1, self.num_attention_heads * self.head_dim))
    gated: Tensor = sigmoid(self.output_gate(hidden_states)) * normed
    return self.out_proj(gated), None


def zamba_mixer(
    self: Any, hidden_states: Tensor, cache_params: None = None, attention_mask: Any = None, **options: Any
) -> Tensor:
    """Mamba of several heads, each with its own projections. hidden_states: [1, T, hidden]; returns the same."""
    heads, width, n = self.n_mamba_heads, self.mamba_head_dim, self.ssm_state_size
    x, gate = self.in_proj(hidden_states).squeeze(0).reshape(-1, heads * width, 2).unbind(-1)
    x = self.act(_llmc.causal_conv.default(x, self.conv1d.weight.squeeze(1).t(), self.conv1d.bias))
    A, scans = -torch.exp(self.A_log.float()), []
    for i, own in enumerate(x.split(width, -1)):
        dt, B, C = linear(own, self.x_proj_weight[i]).split([self.time_step_rank, n, n], -1)
        dt = softplus(linear(dt, self.dt_proj_weight[i]).float() + self.dt_proj_bias[i].float())
        scans.append(_llmc.selective_scan.default(own.float(), dt, A[i], B.float(), C.float()))
    y = torch.cat(scans, -1) + x * self.D.float().flatten()
    scanned: Tensor = self.out_proj((y * silu(gate)).to(hidden_states.dtype).unsqueeze(0))
    return scanned


def causal_conv(self: nn.Conv1d, x: Tensor) -> Tensor:
    """A depthwise causal convolution, without the padding after the last token that models cut off. x: [1, channels,
    T]; returns the same."""
    is_causal = self.padding == (self.kernel_size[0] - 1,) and self.stride == self.dilation == (1,)
    if not is_causal or self.groups != self.in_channels or self.groups != self.out_channels:
        return nn.Conv1d.forward(self, x)
    y: Tensor = _llmc.causal_conv.default(x.squeeze(0).t(), self.weight.squeeze(1).t(), self.bias)
    return y.t().unsqueeze(0)


def convolved_heads(
    self: Any, hidden_states: Tensor, past_key_values: None = None, conv_mask: None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Zaya's queries, keys and values, [1, T, heads, head_dim] each: a convolution of channels by themselves, one of
    heads, and values half of which are the token's before. hidden_states: [1, T, hidden].

    The model pads its input, not what the first convolution makes of it: before the first token that is its bias.
    """
    x = hidden_states.squeeze(0)
    joined = torch.cat((self.q_proj(x), self.k_proj(x)), -1).unflatten(-1, (-1, self.head_dim))
    q, k = joined.split((self.num_attention_heads, self.num_key_value_heads), 1)
    by_group = q.unflatten(1, (self.num_key_value_heads, self.num_key_value_groups))
    mean = (by_group + k.unsqueeze(2)) * 0.5
    first, second = self.conv_qk_depthwise, self.conv_qk_grouped
    mixed = _llmc.causal_conv.default(joined.flatten(1), first.weight.squeeze(1).t(), None)
    weights = second.weight.unflatten(0, (second.groups, -1))
    y = torch.zeros_like(joined)
    for tap, weight in enumerate(weights.unbind(-1)):
        shifted = _shifted(mixed, second.kernel_size[0] - 1 - tap) + first.bias
        y = y + _llmc.head_linear.default(shifted.unflatten(-1, (second.groups, -1)), weight)
    y = y + second.bias.unflatten(0, (second.groups, -1))
    delayed = _shifted(linear(x, self.v_proj_delayed.weight), 1)
    if self.v_proj_delayed.bias is not None:
        delayed = delayed + self.v_proj_delayed.bias
    v = torch.cat((self.v_proj_current(x), delayed), -1).unflatten(-1, (-1, self.head_dim))
    mixed_q, mixed_k = y.split((self.num_attention_heads, self.num_key_value_heads), 1)
    q, k = mixed_q + mean.flatten(1, 2), mixed_k + mean.mean(2)
    return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)


def _shifted(x: Tensor, tokens: int) -> Tensor:
    """The values `tokens` tokens earlier: a convolution with the taps 1, 0, … x: [T, channels]."""
    if tokens == 0:
        return x
    ones = torch.ones(1, x.shape[-1])
    taps = torch.cat((ones, torch.zeros(tokens, x.shape[-1])))
    shifted: Tensor = _llmc.causal_conv.default(x, taps, None)
    return shifted


def token_shift(self: nn.ZeroPad2d, x: Tensor) -> Tensor:
    """The values of the previous token: a convolution with the taps 1 and 0. x: [1, T, channels]; returns the same."""
    if tuple(self.padding) != (0, 0, 1, -1):
        return nn.ZeroPad2d.forward(self, x)
    return _shifted(x.squeeze(0), 1).unsqueeze(0)


def leave_scales(self: Any) -> None:
    """RWKV halves its residual stream every few layers, and weights with it, for the range of fp16, which no engine
    computes in; norms are invariant to it, except for their eps. A model whose weights are halved already has a flag
    and continues to halve the stream."""


# By the class of a module and the method that they take the place of.
METHODS: dict[tuple[str, str], Callable[..., Any]] = {
    ("Conv1d", "forward"): causal_conv,
    ("MiniMaxLightningAttention", "forward"): lightning_attention,
    ("RecurrentGemmaRglru", "_rnn_scan"): rg_lru,
    ("RwkvModel", "_rescale_layers"): leave_scales,
    ("ZambaMambaMixer", "forward"): zamba_mixer,
    ("ZayaCCAProjection", "forward"): convolved_heads,
    ("ZeroPad2d", "forward"): token_shift,
    ("xLSTMBackend", "forward"): mlstm,
}
