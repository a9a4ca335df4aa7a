"""One client's request in the loop: the sequences that it consists of, and what comes out when all have ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llmc.errors import RequestError
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.request import Request
from llmc.runtime.requests.request_output import ChoiceResult, FinishReason, TokenLogprobs


class GenerationJob(Protocol):
    """The interface of a request for the loop's drivers."""

    @property
    def first(self) -> Request:
        """The sequence to put into the loop; it starts the others."""

    @property
    def sequences(self) -> Sequence[Request]:
        """All sequences that may be in the loop now."""

    @property
    def finished(self) -> bool:
        """Whether all have ended."""

    @property
    def error(self) -> RequestError | None:
        """The reason why the request has failed."""

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry per token of the prompt, None for the first. None if they were not requested."""

    def stop(self, reason: FinishReason) -> None:
        """End what has not ended."""

    def results(self) -> list[ChoiceResult]:
        """The choices to give, in order. Only when finished without an error."""


@dataclass(frozen=True)
class SampledJob:
    """Choices that are sampled independently; `given` of them are the answer: all, or the likeliest (best_of)."""

    choices: tuple[Generation, ...]
    given: int
    with_logprobs: bool

    @property
    def first(self) -> Generation:
        """The choice that computes the prompt."""
        return self.choices[0]

    @property
    def sequences(self) -> Sequence[Generation]:
        return self.choices

    @property
    def finished(self) -> bool:
        """Whether all have ended, or one has failed."""
        return all(choice.finished for choice in self.choices) or self.error is not None

    @property
    def error(self) -> RequestError | None:
        return next((choice.error for choice in self.choices if choice.error is not None), None)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """The log-probabilities that were computed with the prompt; also None for tokens that a cut request has not
        reached."""
        if not self.first.scored_end:
            return None
        logprobs = self.first.prompt_logprobs
        return (None, *logprobs, *[None] * (self.first.prompt_tokens - 1 - len(logprobs)))

    def stop(self, reason: FinishReason) -> None:
        """End every choice."""
        for choice in self.choices:
            if not choice.finished:
                choice.stop(reason)

    def results(self) -> list[ChoiceResult]:
        """Return the finished choices in order of index, or the likeliest by mean log-probability first."""
        choices = list(self.choices)
        if self.given < len(choices):
            choices.sort(key=lambda c: -(c.cumulative_logprob or 0.0) / max(1, len(c.tokens) - c.prompt_tokens))
        return [_choice_result(choice, self.with_logprobs) for choice in choices[: self.given]]


def _choice_result(choice: Generation, with_logprobs: bool) -> ChoiceResult:
    assert choice.finish_reason is not None
    return ChoiceResult(
        choice.output,
        choice.finish_reason,
        choice.stop_reason,
        tuple(choice.logprobs) if choice.logprobs is not None and with_logprobs else None,
        choice.cumulative_logprob,
        None if choice.text is None else choice.text.text(),
    )
