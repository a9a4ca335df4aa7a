"""What the engine gives back for a request: deltas of each choice, log-probabilities, token counts and times."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

# What a model gives for a whole text: [width], fp32.
Row = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort", "deadline"]


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's natural log-probability under the model's own distribution: before penalties, bias, temperature.

    rank: 1 for the likeliest. top: the likeliest tokens and their log-probabilities, likeliest first, as many as
    were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ChoiceResult:
    """One finished choice. text: None if it was not decoded on the way; it is then that of the tokens. row: of a text
    that was read for it."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    cumulative_logprob: float | None
    text: str | None
    row: Row | None = None


@dataclass(frozen=True)
class ChoiceDelta:
    """What one choice has gained since the last output that named it.

    text: whole characters only, cut before a stop string; may lag behind token_ids, and catches up in the last delta.
    logprobs: one a token of token_ids, or None if not asked for. finish_reason: None until the choice's last delta.
    stop_reason: the stop string or the stop token id that ended it (None for end-of-text and for other reasons). row:
    of a request that a row answers, which has no tokens.
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
    """Tokens so far. cached_tokens: of the prompt, found in the prefix cache. completion_tokens: over all choices."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class RequestTimes:
    """time.monotonic() seconds. started: first token of the prompt computed; None for what has not happened."""

    arrived: float
    started: float | None
    first_token: float | None
    finished: float | None


@dataclass(frozen=True)
class RequestOutput:
    """News of a request. The last one has finished=True, and by then every choice had its finish_reason.

    prompt_logprobs: in the first output only, if asked for: None for the first token, then one for each. notes: in the
    first output only: what the request asked for that was ignored.
    """

    request_id: str
    choices: tuple[ChoiceDelta, ...]
    usage: Usage
    finished: bool
    times: RequestTimes
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    notes: tuple[str, ...] = ()
