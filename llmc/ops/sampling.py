"""Choosing tokens from rows of logits: llmc::argmax_rows, llmc::top_k_rows and llmc::sample_candidates.

With them only token ids leave the device, not logits. Random numbers are Philox 4x32 with ten rounds (Salmon, Moraes,
Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by a request's seed and counted by its own
counter: what a request draws does not depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.ops.registry import op

_WORD = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
# The largest fp32 below 1 / 2³¹, so that the product with any 31-bit number stays below 1.
_UNIT = 4.6566127342e-10


def _fake_argmax_rows(logits: Tensor) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)


@op("argmax_rows(Tensor logits) -> Tensor", fake=_fake_argmax_rows)
def argmax_rows(logits: Tensor) -> Tensor:
    """Each row's largest logit's index, int32; the lowest one of equals. logits: [rows, vocabulary]."""
    largest = logits.max(-1, keepdim=True).values
    return (logits == largest).int().argmax(-1).int()


def _fake_top_k_rows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


@op("top_k_rows(Tensor logits, int k) -> (Tensor, Tensor)", fake=_fake_top_k_rows)
def top_k_rows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Each row's k largest logits, in descending order, and their indices, int32; of equals the lower index first.

    logits: [rows, vocabulary]; both results: [rows, k].
    """
    values, indices = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), indices[:, :k].int()


def _fake_sample_candidates(
    values: Tensor,
    indices: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
) -> Tensor:
    return torch.empty_like(temperature, dtype=torch.int32)


@op(
    "sample_candidates(Tensor values, Tensor indices, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seeds, Tensor counters) -> Tensor",
    fake=_fake_sample_candidates,
)
def sample_candidates(
    values: Tensor,
    indices: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
) -> Tensor:
    """Draw one of each row's candidates, which top_k_rows made; returns their indices: [rows], int32.

    values, indices: [rows, candidates]; the others: [rows], fp32 (temperature, top_p, min_p) and int32. Among the
    first top_k candidates, at temperature 1 or another, those stay before which less than top_p of the probability
    lies, then those with at least min_p times the likeliest's. Temperature 0 takes the first. The candidates are all
    that is known of a row: filters that would keep more keep all of them. seeds, counters: of the random number.
    """
    lanes = torch.arange(values.shape[1])
    weights = torch.exp((values - values[:, :1]) / torch.where(temperature > 0, temperature, 1.0)[:, None])
    weights = torch.where(lanes < torch.where(temperature > 0, top_k, 1)[:, None], weights, 0.0)
    before = weights.cumsum(-1) - weights
    keep = (before < top_p[:, None] * weights.sum(-1, keepdim=True)) & (weights >= min_p[:, None]) & (weights > 0)
    weights = torch.where(keep, weights, 0.0)
    target = uniform(seeds, counters) * weights.sum(-1)
    passed = (keep & (weights.cumsum(-1) <= target[:, None])).sum(-1)
    chosen = torch.minimum(passed, keep.sum(-1) - 1).clamp_min(0)
    return indices.gather(1, chosen[:, None])[:, 0]


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """One number in [0, 1) of fp32 for each pair of seed and counter, int32: what tl.rand(seed, counter) gives."""
    keys = seeds.long() & _WORD, (seeds.long() >> 32) & _WORD
    words = [counters.long() & _WORD, *(torch.zeros_like(counters, dtype=torch.int64),) * 3]
    for _ in range(10):
        # Products of two 32-bit words wrap around in int64, with the right bits.
        even, odd = _ROUND_A * words[0], _ROUND_B * words[2]
        words = [
            (odd >> 32 & _WORD) ^ words[1] ^ keys[0],
            odd & _WORD,
            (even >> 32 & _WORD) ^ words[3] ^ keys[1],
            even & _WORD,
        ]
        keys = (keys[0] + _KEY_A) & _WORD, (keys[1] + _KEY_B) & _WORD
    signed = torch.where(words[0] >= 1 << 31, words[0] ^ _WORD, words[0])
    return signed.float() * _UNIT
