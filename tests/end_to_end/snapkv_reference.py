"""SnapKV on transformers' model, step by step: what an engine that keeps rows by score has to say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from llmc.program import SnapKV
from tests.ops.test_row_choices import published
from tests.tiny_models import tiny_model


def attend_and_note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention over the rows of a cache, whatever their positions. Keeps the rotated queries on the module."""
    new = query[0].transpose(0, 1)
    module.noted = new if len(new) > 1 else torch.cat((module.noted, new))
    group = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (key, value))
    rows, own = torch.arange(key.shape[2]), torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
    scores = (query @ keys.mT * scaling).masked_fill(rows > own, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2), None


def greedy(policy: SnapKV, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The tokens that follow a prompt, and the log-probability of each."""
    AttentionInterface.register("llmc_tests_noting", attend_and_note)
    model = tiny_model("llama")
    before = model.config._attn_implementation
    model.config._attn_implementation = "llmc_tests_noting"
    try:
        with torch.inference_mode():
            return _greedy(model, policy, prompt, count)
    finally:
        model.config._attn_implementation = before


def _greedy(model: Any, policy: SnapKV, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    cache, dropped = DynamicCache(config=model.config), 0
    tokens, found, logprobs, new = list(prompt), list[int](), list[float](), prompt
    for _ in range(count):
        start = len(tokens) - len(new)
        if start == policy.next_cut(len(prompt), dropped):
            dropped += _compact(model, policy, cache, len(prompt))
        positions = torch.arange(start, len(tokens))[None]
        logits = model(torch.tensor([new]), position_ids=positions, past_key_values=cache).logits[0, -1]
        token = int(logits.argmax())
        found.append(token)
        logprobs.append(float(logits.log_softmax(-1)[token]))
        tokens.append(token)
        new = [token]
    return found, logprobs


def _compact(model: Any, policy: SnapKV, cache: Any, prompt: int) -> int:
    """Keep the rows of each layer and KV head that SnapKV keeps. Returns how many go."""
    gone, kept, window = 0, policy.kept(prompt), policy.window
    for layer, own in zip(model.model.layers, cache.layers, strict=True):
        keys = own.keys[0].transpose(0, 1)
        scores = published(layer.self_attn.noted[-window:], keys, policy.pool)
        scores = torch.nn.functional.pad(scores, (0, window), value=float("inf"))
        scores[:, : policy.sinks] = float("inf")
        best = scores.topk(kept, dim=-1).indices.sort(-1).values
        gone = keys.shape[0] - kept
        for name in ("keys", "values"):
            rows = getattr(own, name)
            setattr(own, name, rows.gather(2, best[None, :, :, None].expand(*rows.shape[:2], -1, rows.shape[3])))
    return gone
