"""Policies that keep rows by score on transformers' model, token by token: what an engine has to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from llmc.program import Cut, KVzip, Lru, Progress, Scored, TriAttention
from tests.end_to_end import kvzip_reference
from tests.end_to_end.calibration_queries import calibration_queries
from tests.end_to_end.published_choice import Noted, chosen_rows
from tests.end_to_end.reference_answer import Kept, ReferenceAnswer, keep_rows
from tests.end_to_end.stored_rows import StoredRows
from tests.tiny_models import tiny_model


def attend_and_note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention over the rows of a cache, as it stores them, whatever their positions. Adds to module.noted."""
    new, stored = key.shape[2] - query.shape[2], module.stored
    result, paid = stored.attend(query[0], key[0], value[0], scaling)
    own = stored.keys(key[0, :, new:]), stored.values(value[0, :, new:])
    module.noted.add(query[0].transpose(0, 1), *own, paid.mean(1))
    return result.transpose(0, 1)[None], None


def greedy(
    policy: Scored,
    prompt: list[int],
    count: int,
    family: str = "llama",
    stored: StoredRows | None = None,
    kept: Sequence[Kept] | None = None,
) -> ReferenceAnswer:
    """The tokens that follow a prompt.

    Args:
        policy: Says when rows leave.
        prompt: Its tokens.
        count: Number of tokens to add.
        family: Of the model.
        stored: How caches store rows; None for the numbers as they are.
        kept: The rows that each cut keeps; None for those of the published algorithm.
    """
    stored = StoredRows() if stored is None else stored
    if isinstance(policy, KVzip):
        return kvzip_reference.greedy(policy, prompt, count, stored=stored, kept=kept)
    AttentionInterface.register("llmc_tests_noting", attend_and_note)
    model = tiny_model(family)
    layers = [layer.self_attn for layer in model.model.layers]
    for layer, noted in zip(layers, empty_notes(model, policy), strict=True):
        layer.stored, layer.noted = stored, noted
    before = model.config._attn_implementation
    model.config._attn_implementation = "llmc_tests_noting"
    try:
        with torch.inference_mode():
            return _greedy(model, policy, prompt, count, kept)
    finally:
        model.config._attn_implementation = before


def empty_notes(model: Any, policy: Scored) -> list[Noted]:
    """Notes of each layer of a model without rows."""
    layers = [layer.self_attn for layer in model.model.layers]
    expected = [torch.empty(0)] * len(layers)
    if isinstance(policy, TriAttention):
        expected = calibration_queries(model)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    inv_freq = model.model.rotary_emb.inv_freq
    return [Noted.empty(*heads, layer.head_dim, inv_freq, own) for layer, own in zip(layers, expected, strict=True)]


def _greedy(model: Any, policy: Scored, prompt: list[int], count: int, kept: Sequence[Kept] | None) -> ReferenceAnswer:
    layers = [layer.self_attn for layer in model.model.layers]
    cache, done = DynamicCache(config=model.config), Progress(len(prompt))
    tokens, new, answer = list(prompt), prompt, ReferenceAnswer([], [], [])
    for _ in range(count):
        start = len(tokens) - len(new)
        while (end := policy.next_cut(done)) is not None and end <= start:
            cut = policy.cut(done)
            if isinstance(policy, Lru):
                for layer in layers:
                    layer.noted.use(policy, end)
            if cut.leaving:
                assert end == start, "rows leave between two steps"
                given = None if kept is None else kept[len(answer.kept)]
                answer.kept.append(_compact(layers, policy, cache, cut, len(prompt), given))
            done = done.after(end, cut)
        positions = torch.arange(start, len(tokens))[None]
        logits = model(torch.tensor([new]), position_ids=positions, past_key_values=cache).logits[0, -1]
        token = int(logits.argmax())
        answer.add(token, logits)
        tokens.append(token)
        new = [token]
    return answer


def _compact(layers: Sequence[Any], policy: Scored, cache: Any, cut: Cut, prompt: int, given: Kept | None) -> Kept:
    """Keep the rows that are given, or else those that are chosen."""
    noted = [layer.noted for layer in layers]
    best = chosen_rows(policy, noted, cut, prompt) if given is None else [torch.tensor(rows) for rows in given]
    for notes, own, rows in zip(noted, cache.layers, best, strict=True):
        notes.keep(rows, policy.block)
        keep_rows(own, rows)
    return [rows.tolist() for rows in best]
