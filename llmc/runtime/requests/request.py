"""A request as the scheduler sees it: its tokens, where their keys and values lie, how far the model has read them.

One that is the sampler chooses the tokens of a SampledRequest; other requests read the logits themselves.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.program import CachePolicy
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.requests.generation_request import Priority
from llmc.runtime.requests.request_state import Decoding, KnownPrefix, KnownStates, Standing
from llmc.runtime.sampling.row_choice import RowChoice
from llmc.runtime.sampling.sampler import Sampler


class Forks(Protocol):
    """Operations of a request on sequences that share its prompt; see Scheduler."""

    def fork(self, parent: "Request", child: "Request") -> None:
        """Start `child` on the parent's blocks."""

    def resume(self, request: "Request") -> None:
        """Requeue a request that has tokens to compute again."""

    def remove(self, request: "Request") -> None:
        """Drop it."""


@dataclass(frozen=True, eq=False)
class Origin:
    """A client's request: all sequences that serve it have the same object.

    salt: only requests with the same salt share cached prefixes; None shares with none. arrived: time.monotonic(); None
    means now. deadline: on the same clock; None means no limit. adapter: the adapter of all its tokens. policy: the
    policy of the caches of layers whose requests choose one; None for the engine's. instruction: tokens that a second
    reading begins with (second_reading.py).
    """

    priority: Priority = Priority.FREE
    salt: bytes | None = b""
    arrived: float | None = None
    deadline: float | None = None
    adapter: PlacedAdapter | None = None
    policy: CachePolicy | None = None
    instruction: tuple[int, ...] = ()


class Request(ABC):
    """Tokens to be read by the model, and what is done with the logits that it gives for them.

    A client's request with several choices has one of these for each. The loop calls what subclasses define across the
    boundary (boundary.py): it may raise.

    tokens: the prompt and the generated tokens. prompt_length: tokens of the prompt, which `tokens` begins with (None:
    all that are given). finished: no step may follow. scored, scored_end: logits are needed after each token from
    position `scored` to before `scored_end`, and always after the last one. error: the reason why it cannot continue.
    origin: that of the client's request; priority, salt, arrived, deadline, adapter: its values, but a failed request
    has no salt. standing, decoding, prefix, states: records of other modules; see request_state.py.
    """

    def __init__(
        self, prompt: Sequence[int], *, every_logit: bool, origin: Origin, prompt_length: int | None = None
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(self.tokens) if prompt_length is None else prompt_length
        self.scored = 0
        self.scored_end = len(self.tokens) if every_logit else 0
        self.finished = False
        self.error: RequestError | None = None
        self.origin = origin
        self.priority = origin.priority
        self.salt = origin.salt
        self.arrived = time.monotonic() if origin.arrived is None else origin.arrived
        self.deadline = origin.deadline
        self.adapter = origin.adapter
        self.standing = Standing()
        self.decoding = Decoding()
        self.prefix = KnownPrefix()
        self.states = KnownStates()

    @property
    def computed(self) -> int:
        """Number of tokens whose keys and values are in the blocks. While the request decodes, it is all except the
        last, without counting."""
        return self.standing.computed if self.decoding.place is None else len(self.tokens) - 1

    @property
    def choice(self) -> RowChoice | None:
        """Return how a device can choose the next token without showing its logits; None if the request needs them."""
        return None

    def read(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Pass the awaited logits to `receive`, and mark them as received."""
        self.receive(start, logits)
        self.scored = max(self.scored, start + len(logits))

    @abstractmethod
    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Take the logits [rows, vocabulary] after the tokens from position `start` on; they are overwritten later."""

    def fail(self, error: RequestError) -> None:
        """End without an answer, and make the blocks unavailable to others. For the scheduler: callers raise the
        error."""
        self.error = error
        self.salt = None
        self.end()

    def end(self) -> None:
        """Request no further steps."""
        self.finished = True

    def follow(self, forks: Forks) -> None:  # noqa: B027  (most requests start no others)
        """After `receive`: start, resume or remove other sequences of the same client's request."""

    def expire(self) -> None:
        """End with the current output, because the deadline has passed."""
        self.end()

    @property
    def pending(self) -> int:
        """The number of tokens that the model has not read yet; in a second reading, those of the part."""
        reading = self.standing.reading
        return (len(self.tokens) if reading is None else reading.part_end) - self.computed

    @property
    def own_computed(self) -> int:
        """The same as `computed`, without the tokens of a second reading."""
        reading = self.standing.reading
        return self.computed if reading is None else reading.end

    def logit_rows(self, count: int) -> int:
        """Number of rows of logits that a step over the next `count` tokens must return, for the last of them."""
        if self.standing.reading is not None:
            return 0
        end = self.computed + count
        if self.scored >= self.scored_end:
            return int(end == len(self.tokens))
        first_scored = max(self.computed, self.scored)
        if first_scored < min(end, self.scored_end):
            return end - first_scored
        return 1 if end == len(self.tokens) else 0

    def fitting(self, tokens: int, rows: int) -> int:
        """Number of pending tokens that fit into a step with room for `tokens` tokens and `rows` rows of logits."""
        stops = self.states.stops
        count = min(self.pending, tokens, stops[0] - self.computed) if stops else min(self.pending, tokens)
        if (rows and self.scored >= self.scored_end) or self.standing.reading is not None:
            return count
        if self.logit_rows(count) <= rows:
            return count
        if self.scored < self.scored_end:
            return max(0, self.scored - self.computed) + rows
        return count - 1


class SampledRequest(Request):
    """A request whose tokens `sampler` chooses.

    is_steady: from now on each step over its last token gives it exactly one more, by `accept`, or ends it. Until then
    it reads its logits with `receive`. prompt_tokens: how many of its tokens are the prompt's. most: how many it has at
    the end, if nothing ends it earlier. reads_logits: `accept` gets the row that the token was chosen from.
    """

    is_steady: bool
    prompt_tokens: int
    most: int
    reads_logits = False

    def __init__(self, prompt: Sequence[int], sampler: Sampler, *, every_logit: bool, origin: Origin) -> None:
        super().__init__(prompt, every_logit=every_logit, origin=origin)
        self.sampler = sampler

    @abstractmethod
    def accept(self, token: int, logits: npt.NDArray[np.float32] | None) -> None:
        """Take the next token. logits: the row that it was chosen from, [vocabulary], if `reads_logits`; overwritten
        later."""
