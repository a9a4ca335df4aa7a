"""Choosing tokens from rows of logits: llmc::argmax_rows, draw_rows, top_k_rows, row_masses and sample_candidates.

With them only token ids leave the device, not logits. A draw is the largest sum of logit / temperature and Gumbel noise
(Gumbel 1954), among the tokens that the filters keep. The noise is a function of a request's seed, its own counter and
the token, the same in every kernel and on the host: what a request draws does not depend on its neighbours, nor on who
draws it, up to the rounding of its logits.

Noise is -log of the time at which a token's clock rings. The first of a group's 64 clocks rings after a 64th of an
exponential time, and each is as likely to be it; as clocks have no memory, each other one rings an exponential time
after it. So one number tells how large the noise of 64 tokens can be, and a kernel on a CPU passes over most groups.
Random numbers are Philox 4x32 with ten rounds (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3"): of each group, and of places whose four words are for four tokens that lie NOISE_RUN apart.
"""

from typing import Any

import torch
from torch import Tensor

from llmc.ops.registry import IN_NO_GRAPH, like, op, per_element

_WORD = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
# The largest fp32 below 1 / 2³¹, so that the product with any 31-bit number stays below 1.
_UNIT = 4.6566127342e-10
# A value of top_k above any vocabulary size, which keeps all tokens.
EVERY_TOKEN = 2**31 - 1
# More than any token.
_NO_TOKEN = 2**31 - 1
NOISE_GROUP = 64
NOISE_RUN = NOISE_GROUP // 4
# Where the places of the groups themselves begin.
GROUP_PLACES = 2**30
# Six bits of a word.
WINNER_SHIFT = 26
# Below this, -log(1 - u) is summed as a series: the difference from 1 would lose u's digits.
_SMALL = 0.015625


def _token_and_score(a: Any) -> tuple[Tensor, Tensor]:
    return a.logits.new_empty((a.logits.shape[0],), dtype=torch.int32), a.logits.new_empty((a.logits.shape[0],))


def _top_k(a: Any) -> tuple[Tensor, Tensor]:
    shape = (a.logits.shape[0], a.k)
    return a.logits.new_empty(shape), a.logits.new_empty(shape, dtype=torch.int32)


@op(fake=_token_and_score, stages=IN_NO_GRAPH, flops=per_element(1), rows=("logits",))
def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each row's largest logit, int32, the lowest of equal ones, and that logit: [rows] each.

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
    noise = token_noise(seeds[:, None], counters[:, None], torch.arange(logits.shape[1]).expand(logits.shape))
    return _largest(torch.where(is_random, logits / torch.where(is_random, temperature[:, None], 1.0) + noise, logits))


def _largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.where(scores.isnan(), torch.inf, scores)
    largest = scores.max(-1, keepdim=True).values
    return (scores == largest).int().argmax(-1).int(), largest[:, 0]


@op(fake=_top_k, stages=IN_NO_GRAPH, flops=per_element(1), rows=("logits",))
def top_k_rows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each row's k largest logits, in descending order, and their indices, int32; of equal ones the lower index
    first.

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

    values, indices: [rows, candidates], the result of top_k_rows; complete: they are the whole vocabulary. masses: the
    result of row_masses; drawn: the result of draw_rows, used if there is no filter or the temperature is 0. The
    others: [rows], fp32 (temperature, top_p, min_p) and int32. top-k keeps the first top_k; top-p keeps tokens whose
    predecessors have less than top_p of the remaining mass; min-p keeps tokens at least min_p times as likely as the
    first. covered: 1 if the candidates include all tokens that the filters keep; 0 if they may not, or if a tie at the
    edge of top-k keeps further tokens. A row with 0 must be sampled again.
    """
    count = values.shape[1]
    is_random = temperature > 0
    weights = torch.exp((values - values[:, :1]) / torch.where(is_random, temperature, 1.0)[:, None])
    cuts = (top_k < count)[:, None]
    weights = torch.where(torch.arange(count) < top_k[:, None], weights, 0.0)
    total = torch.where(cuts[:, 0] | complete, weights.sum(-1), masses)[:, None]
    before = weights.cumsum(-1) - weights
    keep = (before < top_p[:, None] * total) & (weights >= min_p[:, None]) & (weights > 0)
    divisor = torch.where(is_random, temperature, 1.0)[:, None]
    sums = torch.where(keep, values / divisor + token_noise(seeds[:, None], counters[:, None], indices), -torch.inf)
    is_largest = keep & (sums == sums.max(-1, keepdim=True).values)
    chosen = torch.where(is_largest, indices, _NO_TOKEN).min(-1).values
    edge = values.gather(1, top_k.long().clamp(1, count)[:, None] - 1)[:, 0]
    beyond = values.gather(1, top_k.long().clamp_max(count - 1)[:, None])[:, 0]
    covered = torch.where(cuts[:, 0], edge > beyond, complete | ~keep[:, -1])
    plain = ~is_random | ((top_k == EVERY_TOKEN) & (top_p >= 1) & (min_p <= 0))
    return torch.where(plain, drawn, chosen), (plain | covered).int()


def token_noise(seeds: Tensor, counters: Tensor, tokens: Tensor) -> Tensor:
    """The noise of tokens, fp32, of tokens' shape; seeds and counters: int32, with one column for each of its rows."""
    group, place = tokens.long() // NOISE_GROUP, tokens.long() % NOISE_GROUP
    number, winner, _, _ = random_words(seeds, counters, group + GROUP_PLACES)
    first = waiting_time(uniform(number)) / NOISE_GROUP
    words = torch.stack(random_words(seeds, counters, group * NOISE_RUN + place % NOISE_RUN))
    own = waiting_time(uniform(words.gather(0, (place // NOISE_RUN)[None])[0]))
    return -torch.log(torch.where(place == winner >> WINNER_SHIFT, first, first + own))


def waiting_time(u: Tensor) -> Tensor:
    """-log(1 - v) for v = u plus half the distance of two neighbours: exponentially distributed for u uniform."""
    v = u + 0.5 * _UNIT
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return torch.where(v < _SMALL, series, -torch.log(1.0 - v))


def uniform(words: Tensor) -> Tensor:
    """Convert random words to numbers in [0, 1), fp32. words: int64 of 32 bits."""
    return torch.where(words >= 1 << 31, words ^ _WORD, words).float() * _UNIT


def random_words(seeds: Tensor, counters: Tensor, places: Tensor) -> list[Tensor]:
    """Four words for each place, int64 of 32 bits: what tl.randint4x(counter << 32 | seed, place) gives."""
    keys = seeds.long() & _WORD, counters.long() & _WORD
    words = [places.long() & _WORD, *(torch.zeros_like(places, dtype=torch.int64),) * 3]
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
    return words
