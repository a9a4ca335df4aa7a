"""kvzip on transformers' model: the prompt's beginning is read again part by part, and rows stay by their peaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from llmc.program import KVzip, Progress
from tests.tiny_models import tiny_model

CUE = 8


def attend_and_note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention over the rows of a cache, whatever their positions. Keeps the probabilities on the module."""
    rows, group = key.shape[2], query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (key, value))
    ends = torch.arange(query.shape[2])[:, None] + rows - query.shape[2]
    paid = (query @ keys.mT * scaling).masked_fill(torch.arange(rows) > ends, float("-inf")).softmax(-1)
    module.paid = paid[0].view(key.shape[1], group, -1, rows)
    return (paid @ values).transpose(1, 2), None


def greedy(
    policy: KVzip, prompt: list[int], count: int, instruction: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """The tokens that follow a prompt, and the log-probability of each."""
    AttentionInterface.register("llmc_tests_paid", attend_and_note)
    model = tiny_model("llama")
    before = model.config._attn_implementation
    model.config._attn_implementation = "llmc_tests_paid"
    try:
        with torch.inference_mode():
            return _greedy(model, policy, prompt, count, instruction)
    finally:
        model.config._attn_implementation = before


def _greedy(
    model: Any, policy: KVzip, prompt: list[int], count: int, instruction: Sequence[int]
) -> tuple[list[int], list[float]]:
    cache, end = DynamicCache(config=model.config), policy.next_cut(Progress(len(prompt)))
    assert end is not None, "nothing is cut"
    _read(model, cache, prompt[:end], 0)
    kept = policy.cut(Progress(len(prompt))).chosen
    for own, best in zip(cache.layers, _chosen(model, policy, cache, prompt[:end], kept, instruction), strict=True):
        for name in ("keys", "values"):
            rows = getattr(own, name)
            setattr(own, name, rows.gather(2, best[None, :, :, None].expand(*rows.shape[:2], -1, rows.shape[3])))
    new, start, found, logprobs = prompt[end:], end, list[int](), list[float]()
    for _ in range(count):
        logits = _read(model, cache, new, start)
        start += len(new)
        new = [int(logits.argmax())]
        found += new
        logprobs.append(float(logits.log_softmax(-1)[new[0]]))
    return found, logprobs


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
    for each in peaks:
        each[:, : policy.sinks] = float("inf")
    return [each.topk(kept, dim=-1).indices.sort(-1).values for each in peaks]


def _read(model: Any, cache: Any, tokens: Sequence[int], start: int) -> Tensor:
    """The logits after tokens at positions from `start` on."""
    positions = torch.arange(start, start + len(tokens))[None]
    found = model(torch.tensor([list(tokens)]), position_ids=positions, past_key_values=cache)
    logits: Tensor = found.logits[0, -1]
    return logits
