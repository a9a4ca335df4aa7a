"""Policies that keep rows by score on transformers' model, token by token: what an engine has to say."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from llmc.ops.rope import rotate
from llmc.program import H2O, Compactor, Cut, KVzip, Lru, Progress, Scored, SnapKV, TriAttention
from tests.end_to_end import kvzip_reference
from tests.end_to_end.calibration_queries import calibration_queries
from tests.ops import test_score_expected as triattention
from tests.ops import test_score_leverage as compactor
from tests.ops.test_row_choices import published
from tests.tiny_models import tiny_model


def attend_and_note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention over the rows of a cache, whatever their positions.

    Keeps on the module the rotated queries, keys and values of all positions, the positions of the rows, and the
    attention that each query has paid to each row, averaged over the query heads of a KV head.
    """
    new, rows = query[0].transpose(0, 1), key.shape[2]
    is_first = len(new) > 1
    module.noted = new if is_first else torch.cat((module.noted, new))
    own = [each[0, :, rows - len(new) :] for each in (key, value)]
    module.pairs = own if is_first else [torch.cat(each, dim=1) for each in zip(module.pairs, own, strict=True)]
    places = torch.arange(len(module.noted) - len(new), len(module.noted)).expand(key.shape[1], -1)
    module.held = places if is_first else torch.cat((module.held, places), dim=1)
    group = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (key, value))
    ends = torch.arange(query.shape[2])[:, None] + rows - query.shape[2]
    scores = (query @ keys.mT * scaling).masked_fill(torch.arange(rows) > ends, float("-inf")).softmax(-1)
    paid = scores[0].view(key.shape[1], group, -1, rows).mean(1)
    if not is_first:
        paid = torch.cat((torch.nn.functional.pad(module.paid, (0, rows - module.paid.shape[2])), paid), dim=1)
    module.paid = paid
    return (scores @ values).transpose(1, 2), None


def greedy(policy: Scored, prompt: list[int], count: int, family: str = "llama") -> tuple[list[int], list[float]]:
    """The tokens that follow a prompt, and the log-probability of each."""
    if isinstance(policy, KVzip):
        return kvzip_reference.greedy(policy, prompt, count)
    AttentionInterface.register("llmc_tests_noting", attend_and_note)
    model = tiny_model(family)
    before = model.config._attn_implementation
    model.config._attn_implementation = "llmc_tests_noting"
    try:
        with torch.inference_mode():
            return _greedy(model, policy, prompt, count)
    finally:
        model.config._attn_implementation = before


def _greedy(model: Any, policy: Scored, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    if isinstance(policy, TriAttention):
        for layer, queries in zip(model.model.layers, calibration_queries(model), strict=True):
            layer.self_attn.expected = queries
    cache, done = DynamicCache(config=model.config), Progress(len(prompt))
    tokens, found, logprobs, new = list(prompt), list[int](), list[float](), prompt
    for _ in range(count):
        start = len(tokens) - len(new)
        while (end := policy.next_cut(done)) is not None and end <= start:
            cut = policy.cut(done)
            if isinstance(policy, Lru):
                for layer in model.model.layers:
                    _use(policy, layer.self_attn, end, end - done.dropped)
            if cut.leaving:
                assert end == start, "rows leave between two steps"
                _compact(model, policy, cache, cut, len(prompt), end)
            done = done.after(end, cut)
        positions = torch.arange(start, len(tokens))[None]
        logits = model(torch.tensor([new]), position_ids=positions, past_key_values=cache).logits[0, -1]
        token = int(logits.argmax())
        found.append(token)
        logprobs.append(float(logits.log_softmax(-1)[token]))
        tokens.append(token)
        new = [token]
    return found, logprobs


def _scores(policy: Scored, attention: Any, keys: Tensor, cut: Cut, chunks: list[range]) -> Tensor:
    """Of all rows, by KV head, as published. keys: [kv_heads, rows, head_dim]. chunks: positions between updates."""
    if isinstance(policy, TriAttention):
        return _expected(policy, attention, cut)
    if isinstance(policy, H2O):
        sums: Tensor = attention.paid.sum(1)
        return sums
    if isinstance(policy, Lru):
        return torch.tensor([[use for use in head for _ in range(policy.block)] for head in attention.uses])
    if isinstance(policy, Compactor):
        k, v = attention.pairs
        angles = torch.arange(k.shape[1])[:, None] * attention.inv_freq
        plain = rotate(k.transpose(0, 1), angles.cos(), -angles.sin(), interleaved=False).transpose(0, 1)
        stays = {"kept": cut.chosen, "sinks": policy.sinks, "recent": policy.recent}
        return compactor.published(plain, attention.noted.transpose(0, 1), k, v, attention.held, chunks, **stays)
    assert isinstance(policy, SnapKV)
    before = published(attention.noted[-policy.window :], keys.transpose(0, 1), policy.pool)
    return torch.nn.functional.pad(before, (0, policy.window))


def _expected(policy: TriAttention, attention: Any, cut: Cut) -> Tensor:
    k, held = attention.pairs[0], attention.held
    now, free = k.shape[1], slice(max(policy.sinks, cut.pinned), held.shape[1] - policy.recent)
    angles = torch.arange(now)[:, None] * attention.inv_freq
    plain = rotate(k.transpose(0, 1), angles.cos(), -angles.sin(), interleaved=False)
    found = torch.full(held.shape, float("inf"))
    group = attention.expected.shape[1] // len(held)
    for head, own in enumerate(held[:, free]):
        queries = attention.expected[:, head * group : (head + 1) * group]
        keys = plain[own, head : head + 1]
        found[head, free] = triattention.published(queries, keys, own[None], now, attention.inv_freq)[0].float()
    return found


def _joined(policy: TriAttention, scores: Tensor) -> list[Tensor]:
    """By layer, of the heads that choose together. scores: [layers, kv_heads, rows]."""
    if policy.heads == "all":
        return [scores.amax((0, 1)).repeat(len(each), 1) for each in scores]
    return [scores.mean(0) for _ in scores] if policy.heads == "kv_head" else [*scores]


def _use(policy: Lru, attention: Any, end: int, rows: int) -> None:
    """Note on the module, by KV head and block, the number of tokens at its last use, and which use was stronger.

    end: tokens of the sequence at this update. rows: those that the caches hold then.
    """
    paid = attention.paid[:, end - policy.every : end, :rows].mean(1)
    old = attention.uses if end > policy.every else [[] for _ in paid]
    attention.uses = []
    for head, before in zip(paid.tolist(), old, strict=True):
        uses = list[float]()
        for block in range(rows // policy.block):
            share = sum(head[block * policy.block : (block + 1) * policy.block])
            is_new = block >= len(before)
            uses.append(end + share if is_new or share >= policy.block / rows else before[block])
        attention.uses.append(uses)


def _compact(model: Any, policy: Scored, cache: Any, cut: Cut, prompt: int, end: int) -> None:
    """Keep the rows of each layer and KV head with the highest scores, and those that are protected. end: tokens."""
    ends = [0, *policy.cuts(end + 1, prompt)]
    kept, chunks = cut.chosen, [range(*each) for each in pairwise(ends)]
    of_layers = list[Tensor]()
    for layer, own in zip(model.model.layers, cache.layers, strict=True):
        layer.self_attn.inv_freq = model.model.rotary_emb.inv_freq
        of_layers.append(_scores(policy, layer.self_attn, own.keys[0], cut, chunks))
    if isinstance(policy, TriAttention):
        of_layers = _joined(policy, torch.stack(of_layers))
    for layer, own, scores in zip(model.model.layers, cache.layers, of_layers, strict=True):
        scores[:, : policy.sinks] = float("inf")
        scores[:, scores.shape[1] - policy.recent :] = float("inf")
        best = scores.topk(kept, dim=-1).indices.sort(-1).values
        paid = layer.self_attn.paid
        layer.self_attn.held = layer.self_attn.held.gather(1, best)
        layer.self_attn.paid = paid.gather(2, best[:, None].expand(-1, paid.shape[1], -1))
        if isinstance(policy, Lru):
            firsts = best[:, :: policy.block] // policy.block
            uses = layer.self_attn.uses
            layer.self_attn.uses = [[own[i] for i in head] for own, head in zip(uses, firsts.tolist(), strict=True)]
        for name in ("keys", "values"):
            rows = getattr(own, name)
            setattr(own, name, rows.gather(2, best[None, :, :, None].expand(*rows.shape[:2], -1, rows.shape[3])))
