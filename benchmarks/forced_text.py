"""Passages of a text whose ends an engine is made to generate, with the logits that it had before each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

import llmc
from benchmarks.special_prefix import special_prefix
from llmc.passes.parallel_map import one_thread

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Passage:
    """Token ids of a piece of text.

    Args:
        prompt: what an engine reads, special tokens included.
        continuation: what follows in the text.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Prediction:
    """How continuations are predicted.

    Args:
        perplexity: of their tokens.
        divergence: mean KL from the distributions that are expected, in nats.
        same: share of tokens before which the likeliest one is the expected one.
    """

    perplexity: float
    divergence: float
    same: float


def passages(tokenizer: Path, text: Path, count: int, length: int, forced: int) -> list[Passage]:
    """Passages that lie evenly in a text, with prompts of `length` tokens and continuations of `forced` tokens."""
    tokens = Tokenizer.from_file(str(tokenizer))
    prefix = special_prefix(tokens)
    ids: list[int] = tokens.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    own = length - len(prefix)
    starts = np.linspace(0, len(ids) - own - forced, count).astype(int).tolist()
    return [
        Passage((*prefix, *ids[start : start + own]), tuple(ids[start + own : start + own + forced]))
        for start in starts
    ]


def forced_logits(engine: llmc.Engine, texts: Sequence[Passage], kv_compression: str | None = None) -> list[Logits]:
    """Generate the continuation of each passage, whatever the engine would choose.

    Args:
        engine: a loaded engine.
        texts: passages that share its steps.
        kv_compression: policy of the requests; None for the engine's.

    Returns:
        The engine's logits before each token, [tokens of the continuation, vocabulary] for each passage.
    """
    forced = [_Forced(text.continuation, engine.info.vocab_size) for text in texts]
    params = [
        llmc.SamplingParams(
            max_tokens=len(each.tokens),
            ignore_eos=True,
            logits_processors=[each.processor],
            kv_compression=kv_compression,
        )
        for each in forced
    ]
    engine.generate([list(text.prompt) for text in texts], params)
    return [each.logits for each in forced]


def prediction(texts: Sequence[Passage], found: Sequence[Logits], expected: Sequence[Logits]) -> Prediction:
    """Compare logits before each token of the continuations with expected ones."""
    lost = divergence = 0.0
    same = count = 0
    for text, *pair in zip(texts, found, expected, strict=True):
        with one_thread():
            given, wanted = (torch.from_numpy(logits).double().log_softmax(-1) for logits in pair)
            lost -= float(given.gather(1, torch.tensor(text.continuation)[:, None]).sum())
            divergence += float((wanted.exp() * (wanted - given)).sum())
            same += int((wanted.argmax(-1) == given.argmax(-1)).sum())
        count += len(text.continuation)
    return Prediction(float(np.exp(lost / count)), divergence / count, same / count)


class _Forced:
    """A logits processor that keeps the logits, and allows the next token of a continuation only."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self.tokens = tokens
        self.logits = np.empty((len(tokens), vocabulary), np.float32)

    def processor(self, _: list[int], output: list[int], logits: Logits) -> Logits:
        at = len(output)
        self.logits[at] = logits
        logits[:] = -np.inf
        logits[self.tokens[at]] = 0.0
        return logits
