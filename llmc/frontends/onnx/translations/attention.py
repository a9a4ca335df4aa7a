"""Attention: onnxruntime's GroupQueryAttention and MultiHeadAttention, and the standard's Attention.

Each is over one whole sequence here, whose cache is empty: what such operators return of the cache are K and V. A
window of GroupQueryAttention counts the token itself, as in onnxruntime since 1.23 (before, it did not:
onnxruntime#25927).
"""

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from llmc.frontends.onnx.call import Call, Translated, Translations
from llmc.frontends.onnx.translations.norms import rms_norm
from llmc.frontends.onnx.translations.rotary import rotated


def _group_query(call: Call) -> Translated:
    _refuse_unknown(call)
    heads, kv_heads = call.integer("num_heads"), call.integer("kv_num_heads")
    q, k, v = _by_head(call, heads, kv_heads)
    if call.has(14):
        eps = call.real("qk_norm_epsilon", 1e-6)
        q = rms_norm(q, call.tensor(14), call.real("q_norm_epsilon", eps))
        k = rms_norm(k, call.tensor(15), call.real("k_norm_epsilon", eps))
    if call.integer("do_rotary", 0):
        positions = (call.tensor(9) if call.has(9) else call.positions).squeeze(0)
        tables = (call.tensor(7), call.tensor(8), bool(call.integer("rotary_interleaved", 0)))
        q, k = rotated(q, positions, *tables), rotated(k, positions, *tables)
    width = int(q.shape[2])
    scale = call.real("scale", 0.0) or width**-0.5
    softcap, window = call.real("softcap", 0.0) or None, call.integer("local_window_size", -1)
    sinks = call.optional(11)
    if sinks is None and call.integer("smooth_softmax", 0) == 1:
        sinks = torch.zeros(heads)
    present = tuple(x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    bias = call.optional(10)
    if bias is not None:
        call.unless(sinks is None and window < 0, "it has both a bias and a window or sinks")
        batched = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        mixed = _masked(batched, _causal_bias(bias, call.positions), scale, softcap)
        return mixed.transpose(1, 2).flatten(2), *present
    attended: Tensor = torch.ops.llmc.attention.default(q, k, v, scale, window if window > 0 else None, softcap, sinks)
    return attended.flatten(1).unsqueeze(0), *present


def _refuse_unknown(call: Call) -> None:
    call.unless(call.integer("causal", 1) == 1, "it is not causal", fix="only decoders with causal attention are built")
    call.unless(
        not call.has(12) and not call.has(13),
        "its KV cache holds codes",
        fix="choose the cache's format when the engine is built: kv_cache_dtype",
    )
    call.unless(not call.has(16), "its sequences are packed (query_seqlens)")


def _by_head(call: Call, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, heads, head_dim] each."""
    q = call.tensor(0).squeeze(0)
    if call.has(1):
        k, v = call.tensor(1).squeeze(0), call.tensor(2).squeeze(0)
        call.unless(k.dim() == 2 and v.dim() == 2, f"its keys are {list(k.shape)}, those of another layer's cache")
    else:
        width = int(q.shape[1]) // (heads + 2 * kv_heads)
        q, k, v = q.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    return q.unflatten(1, (heads, -1)), k.unflatten(1, (kv_heads, -1)), v.unflatten(1, (kv_heads, -1))


def _causal_bias(bias: Tensor, positions: Tensor) -> Tensor:
    """The causal mask added to a bias. bias: [1, 1, T, T], added to scores."""
    order = positions.squeeze(0)
    visible = order.unsqueeze(0) <= order.unsqueeze(1)
    return torch.where(visible, bias, torch.full((), -torch.inf, dtype=bias.dtype))


def _multi_head(call: Call) -> Translated:
    call.unless(
        not call.has(4), "it has a key padding mask", fix="an engine has no padding; export it with a causal mask"
    )
    call.unless(call.has(1) and call.tensor(0).dim() == 3 == call.tensor(1).dim(), "its Q, K and V are packed")
    parts = [call.tensor(index) for index in range(3)]
    added = call.optional(3)
    if added is not None:
        widths = [int(part.shape[2]) for part in parts]
        parts = [part + more for part, more in zip(parts, added.split(widths), strict=True)]
    q, k, v = (part.unflatten(2, (call.integer("num_heads"), -1)).transpose(1, 2) for part in parts)
    scale = call.real("scale", 0.0) or int(q.shape[-1]) ** -0.5
    mixed = _attended(call, q, k, v, scale, call.optional(5), bool(call.integer("unidirectional", 0)))
    return mixed.transpose(1, 2).flatten(2), k, v


def _standard(call: Call) -> Translated:
    parts = [call.tensor(index) for index in range(3)]
    is_flat = parts[0].dim() == 3
    if is_flat:
        heads = [call.integer("q_num_heads"), *[call.integer("kv_num_heads")] * 2]
        parts = [part.unflatten(2, (count, -1)).transpose(1, 2) for part, count in zip(parts, heads, strict=True)]
    call.unless(not call.has(6), "its KV cache has a fixed length: nonpad_kv_seqlen")
    q, k, v = parts
    scale = call.real("scale", 0.0) or int(q.shape[-1]) ** -0.5
    softcap = call.real("softcap", 0.0) or None
    mixed = _attended(call, q, k, v, scale, call.optional(3), bool(call.integer("is_causal", 0)), softcap)
    return mixed.transpose(1, 2).flatten(2) if is_flat else mixed, k, v


def _attended(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
    softcap: float | None = None,
) -> Tensor:
    """[1, heads, T, head_dim] each; K and V may have fewer heads."""
    alike = statically_known_true(q.shape[2] == k.shape[2])
    # With equal numbers of keys and queries, causality is unambiguous; otherwise there are two forms, and runtimes
    # differ.
    call.unless(alike, f"it has {k.shape[2]} keys for {q.shape[2]} queries of a whole sequence")
    if mask is None:
        call.unless(is_causal, "it is not causal: it has no mask", fix="only decoders with causal attention are built")
        by_token = [x.squeeze(0).transpose(0, 1) for x in (q, k, v)]
        mixed: Tensor = torch.ops.llmc.attention.default(*by_token, scale, None, softcap, None)
        return mixed.transpose(0, 1).unsqueeze(0)
    if mask.dtype is torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=q.dtype), torch.full((), -torch.inf, dtype=q.dtype))
    return _masked([q, k, v], _causal_bias(mask, call.positions) if is_causal else mask, scale, softcap)


def _masked(qkv: list[Tensor], mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Compute attention with single ops, so that passes see what the mask is."""
    q, k, v = qkv
    group = int(q.shape[1]) // int(k.shape[1])
    if group > 1:
        k, v = (x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.matmul(torch.softmax(scores + mask, -1), v)


ATTENTION: Translations = {
    ("", "Attention"): _standard,
    ("com.microsoft", "GroupQueryAttention"): _group_query,
    ("com.microsoft", "MultiHeadAttention"): _multi_head,
}
