"""What other choices of rows would recall: policies that llmc does not have, in transformers, with masks.

A prompt is read whole; the tokens after it see what a choice shows them. Layers with a window see all of it. Nothing is
freed, so this says what a choice would recall, and not what it would cost.

    random            random rows, the same in all layers
    random by head    random rows, others in each layer and KV head
    quest             each query reads the blocks that may hold the largest logits, by the minima and maxima of their
                      keys (Tang et al. 2024): recall if blocks that leave the pool came back when they are asked for
    kvzip by head     the published choice of kvzip: the rows with the largest scores of all layers and heads, so that
                      heads keep different numbers of rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.recall_tasks import Task
from llmc.runtime.requests.second_reading import INSTRUCTION

RANDOM, RANDOM_BY_HEAD, QUEST, KVZIP_BY_HEAD = "random", "random by head", "quest", "kvzip by head"
CHOICES = (RANDOM, RANDOM_BY_HEAD, QUEST, KVZIP_BY_HEAD)
_BLOCK, _SINKS = 16, 4
_NAME = "llmc_recall_masks"

# Layer, queries and keys → which keys each query sees, or None for all of those before it. [kv heads, group, T, rows].
Mask = Callable[[int, Tensor, Tensor], Tensor | None]


def recalled_by(choice: str, path: Path, task: Task, rows: int) -> list[list[list[int]]]:
    """The tokens that follow each prompt, if tokens after it see about `rows` rows of each layer and head.

    Args:
        choice: one of CHOICES.
        path: Hugging Face directory.
        task: what is asked.
        rows: rows of a prompt that stay.

    Returns:
        [depths][prompts][tokens], each the most probable one after those that are right.
    """
    depths = [list(zip(*pair, strict=True)) for pair in zip(task.prompts, task.answers, strict=True)]
    found = logits_by(choice, path, (pair for pairs in depths for pair in pairs), rows, recent=task.asked)
    return [[next(found).argmax(-1).tolist() for _ in pairs] for pairs in depths]


@torch.inference_mode()
def logits_by(
    choice: str,
    path: Path,
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
    rows: int,
    *,
    recent: int,
    sinks: int = 0,
) -> Iterator[Tensor]:
    """The logits of the tokens that follow each prompt, if these tokens see about `rows` rows of each layer and head.

    Args:
        choice: one of CHOICES.
        path: Hugging Face directory.
        pairs: prompts, and the tokens that follow them.
        rows: rows of a prompt that stay.
        recent: number of last rows of a prompt that `random` keeps.
        sinks: number of first rows that `random` keeps.

    Yields:
        [tokens that follow, vocabulary], before each of these tokens.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chance = torch.Generator().manual_seed(1)
    instruction, layers = _instruction(path), range(model.config.num_hidden_layers)
    for prompt, following in pairs:
        match choice:
            case "quest":
                mask = _quest(len(prompt), rows)
            case "kvzip by head":
                mask = _kept(_kvzip(model, prompt, rows, instruction), len(prompt))
            case "random by head":
                heads = model.config.num_key_value_heads
                drawn = {layer: _random(len(prompt), sinks, recent, rows, chance, heads) for layer in layers}
                mask = _kept(drawn, len(prompt))
            case _:
                mask = _kept(dict.fromkeys(layers, _random(len(prompt), sinks, recent, rows, chance)), len(prompt))
        # The last token is only predicted.
        yield _logits(model, [*prompt, *following[:-1]], mask)[len(prompt) - 1 :]


def _instruction(path: Path) -> list[int]:
    """The tokens that ask for a repetition; none for a model without a tokenizer."""
    file = path / "tokenizer.json"
    if not file.exists():
        return []
    ids: list[int] = Tokenizer.from_file(str(file)).encode(INSTRUCTION, add_special_tokens=False).ids
    return ids


def _random(length: int, sinks: int, recent: int, rows: int, chance: torch.Generator, heads: int = 1) -> Tensor:
    """The first and last rows, and random ones between, other ones for each head: [heads, length]."""
    kept = torch.ones(heads, length, dtype=torch.bool)
    for of_head in kept:
        between = of_head[sinks : max(sinks, length - recent)]
        between[torch.randperm(len(between), generator=chance)[max(0, rows - sinks - recent) :]] = False
    return kept


def _quest(length: int, rows: int) -> Mask:
    """For each query after the prompt and each KV head, the blocks with the largest bounds, and the last one."""

    def seen(_: int, query: Tensor, key: Tensor) -> Tensor:
        heads, count = key.shape[:2]
        blocks = -(-count // _BLOCK)
        padded = torch.cat((key, key[:, -1:].expand(-1, blocks * _BLOCK - count, -1)), 1).unflatten(1, (blocks, _BLOCK))
        low, high = padded.amin(2), padded.amax(2)
        later = query[:, length:].unflatten(0, (heads, -1))
        bounds = later.clamp(min=0) @ high[:, None].mT + later.clamp(max=0) @ low[:, None].mT
        by_head = bounds.amax(1)
        own = (torch.arange(length, count) // _BLOCK)[None, :, None]
        by_head.masked_fill_(torch.arange(blocks) > own, float("-inf")).scatter_(2, own.expand(heads, -1, 1), torch.inf)
        best = by_head.topk(min(blocks, rows // _BLOCK), -1).indices
        chosen = torch.zeros_like(by_head, dtype=torch.bool).scatter_(2, best, True)
        mask = torch.ones(heads, query.shape[1], count, dtype=torch.bool)
        mask[:, length:] = chosen.repeat_interleave(_BLOCK, -1)[..., :count]
        return mask[:, None]

    return seen


def _kvzip(model: Any, prompt: Sequence[int], rows: int, instruction: Sequence[int]) -> Mapping[int, Tensor]:
    """The rows with the largest attention of a second reading among all layers and heads, and the last two blocks."""
    end = ((len(prompt) - 1) // _BLOCK - 1) * _BLOCK
    peaks = dict[int, Tensor]()
    again = [*prompt[:end], *instruction, *prompt[:end]]

    def note(layer: int, query: Tensor, key: Tensor) -> None:
        heads = key.shape[0]
        grouped = query[:, end:].unflatten(0, (heads, -1))
        logits = grouped @ key[:, None].mT * model.model.layers[layer].self_attn.scaling
        hidden = torch.arange(key.shape[1]) > torch.arange(end, len(again))[:, None]
        peaks[layer] = logits.masked_fill(hidden, float("-inf")).softmax(-1)[..., :end].amax((1, 2))

    _logits(model, again, note)
    scores = torch.stack(list(peaks.values()))
    scores[..., :_SINKS] = float("inf")
    budget = scores.shape[0] * scores.shape[1] * (rows - (len(prompt) - end))
    best = scores.flatten().topk(budget).indices
    kept = torch.zeros(scores.numel(), dtype=torch.bool).scatter_(0, best, True).view_as(scores)
    tail = torch.ones(*scores.shape[:2], len(prompt) - end, dtype=torch.bool)
    return dict(zip(peaks, torch.cat((kept, tail), -1), strict=True))


def _kept(by_layer: Mapping[int, Tensor], length: int) -> Mask:
    """Rows [kv heads or 1, length] of each layer for the tokens after the prompt."""

    def seen(layer: int, query: Tensor, key: Tensor) -> Tensor:
        kept = by_layer[layer]
        mask = torch.ones(kept.shape[0], query.shape[1], key.shape[1], dtype=torch.bool)
        mask[:, length:, :length] = kept[:, None]
        return mask[:, None]

    return seen


def _logits(model: Any, tokens: Sequence[int], mask: Mask) -> Tensor:
    with _masked(model, mask):
        logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


@contextmanager
def _masked(model: Any, mask: Mask) -> Iterator[None]:
    """Attention in which each query sees the rows before it that the mask, or the layer's window, shows."""
    from transformers import AttentionInterface

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _: Tensor | None,
        scaling: float,
        sliding_window: int | None = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        heads, count = key.shape[1:3]
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        if sliding_window is not None:
            visible = visible.triu(1 - sliding_window)
        elif (shown := mask(module.layer_idx, query[0], key[0])) is not None:
            visible = visible & shown
        logits = query[0].unflatten(0, (heads, -1)) @ key[0][:, None].mT * scaling
        paid = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        return (paid @ value[0][:, None]).flatten(0, 1).transpose(0, 1)[None], None

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attend)
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
