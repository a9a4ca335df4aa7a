"""Choosing tokens from rows of logits: llmc::argmax_rows, draw_rows, top_k_rows, row_masses and sample_candidates.

With them only token ids leave the device, not logits. Random numbers are Philox 4x32 with ten rounds (Salmon, Moraes,
Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by a request's seed and counted by its own
counter: what a request draws does not depend on its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmc.ops.registry import IN_NO_GRAPH, like, op, per_element

_WORD = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
# The largest fp32 below 1 / 2³¹, so that the product with any 31-bit number stays below 1.
_UNIT = 4.6566127342e-10
# As top_k: no vocabulary has so many tokens, so that all are kept.
EVERY_TOKEN = 2**31 - 1
# Below this, -log(1 - u) is summed as a series: the difference from 1 would lose u's digits.
_SMALL = 0.015625


def _token_and_score(a: Any) -> tuple[Tensor, Tensor]:
    return a.logits.new_empty((a.logits.shape[0],), dtype=torch.int32), a.logits.new_empty((a.logits.shape[0],))


def _top_k(a: Any) -> tuple[Tensor, Tensor]:
    shape = (a.logits.shape[0], a.k)
    return a.logits.new_empty(shape), a.logits.new_empty(shape, dtype=torch.int32)


@op(fake=_token_and_score, stages=IN_NO_GRAPH, flops=per_element(1), rows=("logits",))
def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest logit's index, int32, the lowest one of equals, and that logit: [rows] each.

    logits: [rows, vocabulary]. NaN counts as infinite, so that a caller sees from the logit that a row is unusable.
    """
    return _largest(logits)


@op(
    fake=_token_and_score, stages=IN_NO_GRAPH, flops=per_element(1), rows=("logits", "temperature", "seeds", "counters")
)
def draw_rows(logits: Tensor, temperature: Tensor, seeds: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row, drawn from softmax(logits / temperature), and its score: [rows], int32 and fp32.

    logits: [rows, vocabulary]; the others: [rows], fp32 and int32. Temperature 0 takes the largest, as argmax_rows. The
    score is the logit over the temperature plus Gumbel noise, whose largest is the draw (Gumbel 1954); NaN counts as
    infinite.
    """
    is_random = (temperature > 0)[:, None]
    places = torch.arange(logits.shape[1], dtype=torch.int32).expand(logits.shape)
    keys = counters.long() << 32 | seeds.long() & _WORD
    noise = gumbel(uniform(keys[:, None].expand(logits.shape), places))
    return _largest(torch.where(is_random, logits / torch.where(is_random, temperature[:, None], 1.0) + noise, logits))


def _largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.where(scores.isnan(), torch.inf, scores)
    largest = scores.max(-1, keepdim=True).values
    return (scores == largest).int().argmax(-1).int(), largest[:, 0]


def gumbel(u: Tensor) -> Tensor:
    """-log(-log(1 - v)) for v = u plus half the distance of two neighbours: Gumbel-distributed for u uniform."""
    v = u + 0.5 * _UNIT
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return -torch.log(torch.where(v < _SMALL, series, -torch.log(1.0 - v)))


@op(fake=_top_k, stages=IN_NO_GRAPH, flops=per_element(1), rows=("logits",))
def top_k_rows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Each row's k largest logits, in descending order, and their indices, int32; of equals the lower index first.

    logits: [rows, vocabulary]; both results: [rows, k].
    """
    values, indices = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), indices[:, :k].int()


@op(fake=like("temperature"), stages=IN_NO_GRAPH, flops=per_element(1), rows=("logits", "values", "temperature"))
def row_masses(logits: Tensor, values: Tensor, temperature: Tensor) -> Tensor:
    """Σ_v exp((logits[l, v] - values[l, 0]) / temperature[l]): [rows], fp32. Temperature 0 counts as 1.

    logits: [rows, vocabulary]; values: each row's largest logits, which top_k_rows made.
    """
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    return torch.exp((logits - values[:, :1]) / divisor).sum(-1)


@op(fake=like("drawn", "drawn"), stages=IN_NO_GRAPH, flops=per_element(1))
def sample_candidates(
    values: Tensor,
    indices: Tensor,
    masses: Tensor,
    drawn: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
    complete: bool,
) -> tuple[Tensor, Tensor]:
    """(tokens, covered) of rows with filters: a draw among what top-k, top-p and min-p keep; [rows] each, int32.

    values, indices: [rows, candidates], which top_k_rows made; complete: they are the whole vocabulary. masses: of
    row_masses; drawn: of draw_rows, taken where there is no filter or the temperature is 0. The others: [rows], fp32
    (temperature, top_p, min_p) and int32. top-k keeps the first top_k, top-p those before which less than top_p of what
    is left lies, min-p those at least min_p times as likely as the first. covered: 1 where the candidates hold all
    that the filters keep; 0 where they may not, or where equals lie at top-k's edge, which keeps both: that row's token
    must not be used.
    """
    count = values.shape[1]
    is_random = temperature > 0
    weights = torch.exp((values - values[:, :1]) / torch.where(is_random, temperature, 1.0)[:, None])
    cuts = (top_k < count)[:, None]
    weights = torch.where(torch.arange(count) < top_k[:, None], weights, 0.0)
    total = torch.where(cuts[:, 0] | complete, weights.sum(-1), masses)[:, None]
    before = weights.cumsum(-1) - weights
    keep = (before < top_p[:, None] * total) & (weights >= min_p[:, None]) & (weights > 0)
    weights = torch.where(keep, weights, 0.0)
    target = uniform(seeds, counters) * weights.sum(-1)
    passed = (keep & (weights.cumsum(-1) <= target[:, None])).sum(-1)
    chosen = torch.minimum(passed, keep.sum(-1) - 1).clamp_min(0)
    edge = values.gather(1, top_k.long().clamp(1, count)[:, None] - 1)[:, 0]
    beyond = values.gather(1, top_k.long().clamp_max(count - 1)[:, None])[:, 0]
    covered = torch.where(cuts[:, 0], edge > beyond, complete | ~keep[:, -1])
    plain = ~is_random | ((top_k == EVERY_TOKEN) & (top_p >= 1) & (min_p <= 0))
    tokens = torch.where(plain, drawn, indices.gather(1, chosen[:, None])[:, 0])
    return tokens, (plain | covered).int()


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
