"""Outputs of a request: deltas of each choice, log-probabilities, token counts and times."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

# A model's row for a whole text: [width], fp32.
Row = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort", "deadline"]


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's natural log-probability under the model's own distribution: before penalties, bias, temperature.

    rank: 1 for the likeliest. top: the requested number of likeliest tokens with their log-probabilities, likeliest
    first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ChoiceResult:
    """One finished choice. text: None if it was not decoded on the way; it is then that of the tokens. row: the row of
    a text, for a request that asks for one."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    cumulative_logprob: float | None
    text: str | None
    row: Row | None = None


@dataclass(frozen=True)
class ChoiceDelta:
    """The new part of one choice since its last output.

    text: whole characters only, cut before a stop string; may lag behind token_ids, and catches up in the last delta.
    logprobs: one per token of token_ids, or None if not requested. finish_reason: None until the choice's last delta.
    stop_reason: the stop string or stop token id that ended it (None for end-of-text and other reasons). row: the
    answer of a request for a row, which has no tokens.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    row: Row | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts until now. cached_tokens: prompt tokens found in the prefix cache. completion_tokens: sum over all
    choices."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class RequestTimes:
    """Times in seconds of time.monotonic(); None if an event has not happened. started: the first prompt token was
    computed."""

    arrived: float
    started: float | None
    first_token: float | None
    finished: float | None


@dataclass(frozen=True)
class RequestOutput:
    """News of a request. The last one has finished=True, and by then every choice had its finish_reason.

    prompt_logprobs: in the first output only, if requested: None for the first token, then one entry per token. notes:
    in the first output only: fields of the request that were ignored.
    """

    request_id: str
    choices: tuple[ChoiceDelta, ...]
    usage: Usage
    finished: bool
    times: RequestTimes
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    notes: tuple[str, ...] = ()
