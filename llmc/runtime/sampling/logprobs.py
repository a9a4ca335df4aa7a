"""Log-probabilities of tokens from a row of logits."""

import math

import numpy as np
import numpy.typing as npt

from llmc.runtime.requests.request_output import TokenLogprobs

Row = npt.NDArray[np.float32]


def log_normalizer(logits: Row) -> float:
    """log Σ exp(logits): subtract it from a logit for its log-probability. [vocabulary] → natural logarithm."""
    top = float(logits.max())
    return top + math.log(float(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))


def token_logprobs(logits: Row, token: int, count: int) -> TokenLogprobs:
    """The token's log-probability and rank, and the `count` likeliest tokens: [vocabulary] fp32, finite."""
    normalizer = log_normalizer(logits)
    value = logits[token]
    ids = likeliest(logits, count)
    return TokenLogprobs(
        token_id=token,
        logprob=float(value) - normalizer,
        rank=1 + int((logits > value).sum()),
        top=tuple((int(i), float(logits[i]) - normalizer) for i in ids),
    )


def likeliest(scores: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` largest, largest first, of equal ones the lowest id first."""
    count = min(count, len(scores))
    if not count:
        return np.empty(0, np.int64)
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    ids = np.flatnonzero(scores >= threshold)
    return ids[np.argsort(-scores[ids], kind="stable")][:count]
