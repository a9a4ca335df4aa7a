"""Filters of tokens to draw from: temperature, then top-k, top-p, min-p and typical-p, each applied to the result of
the previous one.

top-p: Holtzman et al. 2020; min-p: Nguyen et al. 2024; typical-p: Meister et al. 2022.
"""

import numpy as np
import numpy.typing as npt

from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.sampling.written_tokens import TokenIds

Row = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32]
_SHELLS = 1024


def candidates(scores: Row, best: int, params: SamplingParams) -> tuple[TokenIds | None, Weights]:
    """The tokens that survive temperature and filters, in order of id, and their relative probabilities.

    scores: [vocabulary], whose largest is at `best`. The ids are None when every token survives.
    """
    ids: TokenIds | None = None
    kept = scores
    if params.top_k is not None and params.top_k < len(scores):
        threshold = np.partition(scores, len(scores) - params.top_k)[len(scores) - params.top_k]
        ids = np.flatnonzero(scores >= threshold)
        kept = scores[ids]
    weights: Weights = np.exp((kept - scores[best]) * per_temperature(params))
    if params.top_p < 1.0:
        ids, weights = _taken(ids, weights, _nucleus(weights, params.top_p))
    if params.min_p > 0.0:
        ids, weights = _taken(ids, weights, np.flatnonzero(weights >= np.float32(params.min_p)))
    if params.typical_p < 1.0:
        ids, weights = _taken(ids, weights, _typical(weights, params.typical_p))
    return ids, weights


def per_temperature(params: SamplingParams) -> np.float32:
    """The factor of logits, as in the CPU's kernel; bounded, so that equal logits do not give 0 · inf."""
    with np.errstate(divide="ignore", over="ignore"):
        return min(np.float32(1.0) / np.float32(params.temperature), np.float32(1e30))


def _nucleus(weights: Weights, top_p: float) -> TokenIds:
    """The places that stay when the least likely are dropped as long as those sum to at most 1 - top_p.

    A token below (1 - top_p) / n is always dropped, since all of its kind together weigh less than 1 - top_p: that
    leaves few to sort. Ties at the boundary stay.
    """
    total = float(weights.sum(dtype=np.float64))
    budget = (1.0 - top_p) * total
    likely = np.flatnonzero(weights > budget / len(weights))
    if not len(likely):
        return np.flatnonzero(weights == weights.max())
    values = weights[likely]
    ascending = np.sort(values)
    upto = np.cumsum(ascending, dtype=np.float64)
    unlikely = total - float(upto[-1])
    dropped = int(np.searchsorted(upto, budget - unlikely, side="right"))
    kept: TokenIds = likely[values >= ascending[min(dropped, len(ascending) - 1)]]
    return kept


def _typical(weights: Weights, typical_p: float) -> TokenIds:
    """The places nearest to the distribution's entropy in surprise, as few as sum to typical_p; ties stay.

    Only the tokens about as far as the last one that stays are sorted: sorting all takes a hundred times as long.
    """
    possible = np.flatnonzero(weights)
    probabilities = weights[possible] / weights.sum(dtype=np.float64)
    surprise = -np.log(probabilities)
    # Not a product of the linear algebra library: its threads spin, and the step needs the cores.
    distance = np.abs(surprise - (probabilities * surprise).sum())
    farthest = float(distance.max())
    if not farthest:  # All are as likely.
        return possible
    shell = (distance * (_SHELLS / farthest)).astype(np.int64)
    upto = np.cumsum(np.bincount(shell, probabilities))
    last_shell = min(int(np.searchsorted(upto, typical_p)), len(upto) - 1)
    inside = np.flatnonzero(shell == last_shell)
    inside = inside[np.argsort(distance[inside], kind="stable")]
    below = upto[last_shell - 1] if last_shell else 0.0
    last = min(int(np.searchsorted(np.cumsum(probabilities[inside]), typical_p - below)), len(inside) - 1)
    kept: TokenIds = possible[distance <= distance[inside[last]]]
    return kept


def _taken(ids: TokenIds | None, weights: Weights, places: TokenIds) -> tuple[TokenIds, Weights]:
    return (places if ids is None else ids[places]), weights[places]
