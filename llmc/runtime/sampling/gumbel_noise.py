"""Gumbel noise for the tokens of a row, and the draw that it makes: what llmc.ops.sampling and the kernels compute.

The noise is a function of a request's seed, its count of tokens and the token's id: a request draws the same tokens in
any batch and on any device, up to the rounding of its logits. Philox 4x32 with ten rounds (Salmon, Moraes, Dror and
Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

import math

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.written_tokens import TokenIds

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_UNIT = np.float32(4.6566127342e-10)
# As in llmc.ops.sampling, which needs torch.
_GROUP = 64
_RUN = _GROUP // 4
_GROUP_PLACES = 2**30
# Beyond those of groups.
_OTHER_PLACE = np.uint64(2**31)
_WINNER_SHIFT = np.uint64(26)
_LATEST = (1 + 1 / _GROUP) * 24 * math.log(2)  # of two numbers of at most 1 - 2^-24


def largest_sum(scaled: Floats, seed: int, counter: int) -> int:
    """The token of the largest sum of `scaled` and noise, the lowest of equals.

    scaled: [vocabulary], (logits - maximum) / temperature; -inf for tokens that may not be drawn.
    """
    chosen, sums = _contenders(scaled, seed, counter, 1)
    place = int(sums.argmax())
    return int(chosen[place // _GROUP]) * _GROUP + place % _GROUP


def largest_sums(scaled: Floats, seed: int, counter: int, most: int) -> tuple[Ints, Doubles]:
    """The tokens of the `most` largest sums, the largest first, less those that may not be drawn; and the sums."""
    chosen, sums = _contenders(scaled, seed, counter, most)
    flat = sums.reshape(-1)
    places = np.argsort(-flat, kind="stable")[:most]
    places = places[np.isfinite(flat[places])]
    return chosen[places // _GROUP] * _GROUP + places % _GROUP, flat[places]


def _contenders(scaled: Floats, seed: int, counter: int, most: int) -> tuple[Ints, Doubles]:
    """Groups that include the `most` largest sums, and all sums of these groups: [groups, 64]."""
    vocabulary = len(scaled)
    groups = -(-vocabulary // _GROUP)
    padded = np.full(groups * _GROUP, -np.inf, np.float32)
    padded[:vocabulary] = scaled
    rows = padded.reshape(groups, _GROUP)
    number, winner, _, _ = _words(np.arange(_GROUP_PLACES, _GROUP_PLACES + groups, dtype=np.uint64), seed, counter)
    numbers = _uniform(number)
    winners = (winner >> _WINNER_SHIFT).astype(np.int64)
    # No clock of a group rings before a 64th of its number. Lower bounds of the largest sums are the winners' sums, and
    # for the largest one that of the likeliest token, whose clock has rung by _LATEST.
    ringing = rows[np.arange(groups), winners] - np.log(_waiting_time(numbers) / _GROUP)
    if most == 1:
        least = max(float(ringing.max()), -math.log(_LATEST)) - 1e-3
    else:
        least = float(np.partition(ringing, -most)[-most]) - 1e-3 if most <= groups else -np.inf
    with np.errstate(over="ignore", invalid="ignore"):  # Where fewer may be drawn, all groups that hold any.
        latest = np.exp(rows.max(axis=1) - least)
    chosen = np.flatnonzero(numbers / _GROUP <= latest)
    times = _times(chosen, numbers[chosen], winners[chosen], seed, counter)
    return chosen, rows[chosen].astype(np.float64) - np.log(times)


def uniform_pairs(seeds: Ints, counters: Ints) -> Doubles:
    """Two numbers in (0, 1) for each seed and counter, which no noise is made of: [rows, 2]."""
    first, second, _, _ = _words(np.full(len(seeds), _OTHER_PLACE), seeds.astype(np.int64), counters.astype(np.int64))
    return (np.stack((first, second), axis=1).astype(np.float64) + 0.5) / 2**32


def _times(groups: TokenIds, numbers: Floats, winners: TokenIds, seed: int, counter: int) -> Doubles:
    """Return the arrival times of groups, [groups, 64]."""
    places = (groups[:, None] * _RUN + np.arange(_RUN)).astype(np.uint64)
    own = np.concatenate(_words(places, seed, counter), axis=1)
    first = (_waiting_time(numbers) / _GROUP)[:, None]
    return np.where(np.arange(_GROUP) == winners[:, None], first, first + _waiting_time(_uniform(own)))


def _waiting_time(numbers: Floats) -> Doubles:
    return -np.log1p(-numbers.astype(np.float64))


def _uniform(words: Words) -> Floats:
    """Return numbers in (0, 1), from 31 bits of each word; the least is half a unit."""
    folded = np.where(words >> np.uint64(31), words ^ _WORD, words).astype(np.float32)
    return folded * _UNIT + np.float32(0.5) * _UNIT


def _words(places: Words, seed: int | Ints, counter: int | Ints) -> list[Words]:
    """Four random words for each place; seeds and counters are one, or one a place."""
    words = [places, *(np.zeros_like(places),) * 3]
    low, high = (np.asarray(number & 0xFFFFFFFF).astype(np.uint64) for number in (seed, counter))
    for _ in range(10):
        even, odd = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            odd >> _HALF ^ words[1] ^ low,
            odd & _WORD,
            even >> _HALF ^ words[3] ^ high,
            even & _WORD,
        ]
        low, high = (low + np.uint64(0x9E3779B9)) & _WORD, (high + np.uint64(0xBB67AE85)) & _WORD
    return words
