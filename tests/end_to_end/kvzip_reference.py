"""kvzip on transformers' model: the prompt's beginning is read again part by part, and rows stay by their peaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from llmc.program import KVzip, Progress
from tests.end_to_end.published_choice import best_rows
from tests.end_to_end.reference_answer import Kept, ReferenceAnswer, keep_rows
from tests.end_to_end.stored_rows import StoredRows
from tests.tiny_models import tiny_model

CUE = 8


def attend_and_note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention over the rows of a cache, whatever their positions. Keeps the probabilities on the module."""
    result, module.paid = module.stored.attend(query[0], key[0], value[0], scaling)
    return result.transpose(0, 1)[None], None


def greedy(
    policy: KVzip,
    prompt: list[int],
    count: int,
    instruction: Sequence[int] = (),
    stored: StoredRows | None = None,
    kept: Sequence[Kept] | None = None,
) -> ReferenceAnswer:
    """The tokens that follow a prompt. instruction: Tokens that each part begins with. The other arguments are those of
    scored_reference."""
    AttentionInterface.register("llmc_tests_paid", attend_and_note)
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.stored = StoredRows() if stored is None else stored
    before = model.config._attn_implementation
    model.config._attn_implementation = "llmc_tests_paid"
    try:
        with torch.inference_mode():
            return _greedy(model, policy, prompt, count, instruction, kept)
    finally:
        model.config._attn_implementation = before


def _greedy(
    model: Any, policy: KVzip, prompt: list[int], count: int, instruction: Sequence[int], kept: Sequence[Kept] | None
) -> ReferenceAnswer:
    cache, end = DynamicCache(config=model.config), policy.next_cut(Progress(len(prompt)))
    assert end is not None, "nothing is cut"
    _read(model, cache, prompt[:end], 0)
    if kept is None:
        best = _chosen(model, policy, cache, prompt[:end], policy.cut(Progress(len(prompt))).chosen, instruction)
    else:
        best = [torch.tensor(rows) for rows in kept[0]]
    answer = ReferenceAnswer([], [], [[each.tolist() for each in best]])
    for own, rows in zip(cache.layers, best, strict=True):
        keep_rows(own, rows)
    new, start = prompt[end:], end
    for _ in range(count):
        logits = _read(model, cache, new, start)
        start += len(new)
        new = [int(logits.argmax())]
        answer.add(new[0], logits)
    return answer


def _chosen(
    model: Any, policy: KVzip, cache: Any, text: list[int], kept: int, instruction: Sequence[int]
) -> list[Tensor]:
    """The rows of each layer and KV head that stay, in order."""
    layers, end = model.model.layers, len(text)
    peaks = [torch.zeros(own.keys.shape[1], end) for own in cache.layers]
    for begin in range(0, end, policy.chunk):
        part = [*instruction, *text[max(0, begin - CUE) : begin], *text[begin : begin + policy.chunk]]
        _read(model, cache, part, end)
        for index, layer in enumerate(layers):
            peaks[index] = torch.maximum(peaks[index], layer.self_attn.paid.amax((1, 2))[:, :end])
        cache.crop(-len(part))
    return [best_rows(each, kept, policy.sinks) for each in peaks]


def _read(model: Any, cache: Any, tokens: Sequence[int], start: int) -> Tensor:
    """The logits after tokens at positions from `start` on."""
    positions = torch.arange(start, start + len(tokens))[None]
    found = model(torch.tensor([list(tokens)]), position_ids=positions, past_key_values=cache)
    logits: Tensor = found.logits[0, -1]
    return logits
