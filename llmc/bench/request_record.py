"""The record of one request of a load."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class RequestRecord:
    """The record of one request. Times are in seconds of time.perf_counter(). pieces: arrival time of each piece of
    output.

    error: why it failed, None if it did not. cached_tokens: number of the prompt's tokens that were cached; None if the
    server does not say.
    """

    sent: float
    prompt_tokens: int
    pieces: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int | None = None
    ended: float = 0.0
    error: str | None = None

    @property
    def first_token(self) -> float | None:
        """The time to the first token, in seconds."""
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def per_token(self) -> float | None:
        """Mean seconds of a token after the first."""
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def total(self) -> float:
        """The time from the request to its last piece, in seconds."""
        return self.ended - self.sent

    def seconds(self, latency: str) -> list[float]:
        """The values of a latency named as in summary.py: one per gap for itl, otherwise one, or none if there are too
        few tokens."""
        if latency == "itl":
            return [b - a for a, b in pairwise(self.pieces)]
        value = {"ttft": self.first_token, "tpot": self.per_token, "e2el": self.total}[latency]
        return [] if value is None else [value]
