"""StreamingLLM on transformers' model, as published: keys are cached before they are rotated, and each step rotates all
of them by their places in the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from llmc.program import Progress, Streaming
from tests.end_to_end.logits import Logits
from tests.end_to_end.stored_rows import StoredRows
from tests.tiny_models import tiny_model


def turned(x: Tensor, positions: Tensor, inv_freq: Tensor, sign: float = 1.0) -> Tensor:
    """x: [heads, tokens, channels], rotated by positions, or back with sign -1."""
    angles = sign * positions[:, None].double() * inv_freq.double()
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).float()


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention over module.rows, keys and values, with those of this step behind them. Keys are those before
    their rotation, or, if module.stored says how rows are stored, after it."""
    inv_freq, before, stored = module.inv_freq, module.rows[0].shape[1], module.stored
    own = torch.arange(before, before + key.shape[2])
    if stored is None:
        new = turned(key[0], own, inv_freq, -1.0), value[0]
    else:
        new = stored.keys(key[0]), stored.values(value[0])
    module.rows = tuple(torch.cat(pair, dim=1) for pair in zip(module.rows, new, strict=True))
    keys, values = module.rows
    places = torch.arange(keys.shape[1])
    group = query.shape[1] // key.shape[1]
    if stored is None:
        keys = turned(keys, places, inv_freq)
    keys, values = (each.repeat_interleave(group, 0) for each in (keys, values))
    scores = (query[0] @ keys.mT * scaling).masked_fill(places > own[:, None], float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)[None], None


def streamed_logits(policy: Streaming, tokens: list[int], stored: StoredRows | None = None) -> Logits:
    """Logits after each token; rows leave where the policy says.

    stored: how a cache stores rows. Keys are then stored after their rotation, and each cut turns them back and stores
    them again. None: as published.
    """
    AttentionInterface.register("llmc_tests_streaming", attend)
    model = tiny_model("llama")
    layers = [layer.self_attn for layer in model.model.layers]
    for layer in layers:
        layer.inv_freq, layer.stored = model.model.rotary_emb.inv_freq, stored
        layer.rows = (
            torch.empty(model.config.num_key_value_heads, 0, layer.head_dim),
            torch.empty(model.config.num_key_value_heads, 0, layer.head_dim),
        )
    before, model.config._attn_implementation = model.config._attn_implementation, "llmc_tests_streaming"
    found, dropped, start = list[Tensor](), 0, 0
    try:
        while start < len(tokens):
            end = policy.next_cut(Progress(len(tokens), dropped))
            new = tokens[start:end]
            positions = torch.arange(start - dropped, start - dropped + len(new))[None]
            with torch.inference_mode():
                output = model(torch.tensor([new]), position_ids=positions, use_cache=False)
            found.append(output.logits[0])
            start += len(new)
            if start == end:
                dropped += policy.every
                for layer in layers:
                    _cut(layer, policy)
    finally:
        model.config._attn_implementation = before
    logits: Logits = torch.cat(found).numpy()
    return logits


def _cut(layer: Any, policy: Streaming) -> None:
    keys, values = (x[:, policy.sinks + policy.every :] for x in layer.rows)
    if layer.stored is not None:
        keys = layer.stored.keys(turned(keys, torch.full((keys.shape[1],), policy.every), layer.inv_freq, -1.0))
    layer.rows = tuple(torch.cat((x[:, : policy.sinks], y), 1) for x, y in zip(layer.rows, (keys, values), strict=True))
