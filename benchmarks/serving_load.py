"""Requests with the lengths of a chat service, from a seed; and the batches that a static server makes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.bench.prompts import LoadRequest

# Spread of the logarithm of the lengths. Published chat logs (ShareGPT, LMSYS-Chat-1M) have about 1 for prompts and
# outputs: most answers are short, a few are long.
SIGMA = 1.0


@dataclass(frozen=True)
class Lengths:
    """Median tokens of prompts and outputs; none is longer than `cap` times its median. spread: SIGMA, or 0."""

    prompt: int
    output: int
    cap: int = 8
    spread: float = SIGMA


def chat_requests(lengths: Lengths, count: int, vocab_size: int, seed: int) -> list[LoadRequest]:
    """`count` requests of random token ids with log-normal lengths; no two share a beginning."""
    generator = random.Random(seed)

    def drawn(median: int) -> int:
        return max(4, min(lengths.cap * median, round(median * generator.lognormvariate(0.0, lengths.spread))))

    return [
        LoadRequest(
            tuple(generator.randrange(64, vocab_size) for _ in range(drawn(lengths.prompt))), drawn(lengths.output)
        )
        for _ in range(count)
    ]


def static_batches(requests: Sequence[LoadRequest], users: int) -> list[list[tuple[list[int], int]]]:
    """`users` requests at a time in order of arrival, as a server that answers a batch before it takes the next."""
    return [
        [(list(request.prompt), request.output_len) for request in requests[i : i + users]]
        for i in range(0, len(requests), users)
    ]


def prefix_requests(prefix_tokens: int, count: int, vocab_size: int, seed: int) -> list[LoadRequest]:
    """Requests of one output token that share their first `prefix_tokens` and end in 16 of their own."""
    generator = random.Random(seed)
    prefix = tuple(generator.randrange(64, vocab_size) for _ in range(prefix_tokens))
    return [
        LoadRequest(prefix + tuple(generator.randrange(64, vocab_size) for _ in range(16)), 1) for _ in range(count)
    ]
