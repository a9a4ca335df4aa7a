"""Beam search: the continuations with the highest sum of log-probabilities, found by keeping the best at each length.

The rules are Hugging Face's (GenerationMixin._beam_search): of the best candidates one that ends the text counts only
if it ranks among the first beam_width; a complete one scores sum / length**length_penalty, its end token included; the
search is over when beam_width are complete and early_stopping is set, or when no live beam can still beat the worst.
Beams that share a beginning share its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.generation import Ending, Origin
from llmc.runtime.logprobs import likeliest, log_normalizer
from llmc.runtime.request import Forks, Request
from llmc.runtime.request_output import FinishReason, TokenLogprobs
from llmc.runtime.sampler import check_finite
from llmc.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class _Candidate:
    """A beam and a token after it. total: the log-probability of the whole."""

    beam: Beam
    token: TokenLogprobs
    total: float


@dataclass(frozen=True)
class Hypothesis:
    """A complete continuation. score: what it is ranked by; total: its log-probability."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    total: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | None


class BeamSearch:
    """One client's search; its beams are sequences of the scheduler, and wait for each other at every length.

    hypotheses: the complete ones, best first; the answer when `finished`.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams, ending: Ending, origin: Origin) -> None:
        assert params.beam_width is not None
        self.width = params.beam_width
        self.hypotheses: list[Hypothesis] = []
        self.finished = False
        self.error: RequestError | None = None
        self.prompt_tokens = len(prompt)
        self.origin = origin
        self.first = Beam(self, list(prompt), (), 0.0)
        self._params = params
        self._ending = ending
        self._ends = ending.eos_ids | ending.stop_ids
        self._live: list[Beam] = [self.first]
        self._reports: dict[Beam, list[_Candidate]] = {}

    @property
    def beams(self) -> tuple[Beam, ...]:
        """The live beams."""
        return tuple(self._live)

    def stop(self, reason: FinishReason) -> None:
        """End the search with what there is: the complete ones, then the live ones."""
        for beam in self._live:
            self._complete(beam.logprobs, beam.total, reason, None)
        self._end()

    def report(self, beam: Beam, logits: npt.NDArray[np.float32]) -> None:
        """Take the logits after a live beam: [vocabulary]."""
        normalizer = log_normalizer(logits)
        # Enough that width of them go on, even if every end token is among them (as Hugging Face keeps).
        count = max(2, 1 + len(self._ends)) * self.width
        ids = likeliest(logits, max(count, self._params.logprobs or 0))
        scores = [float(logits[i]) - normalizer for i in ids]
        top = tuple(zip(map(int, ids), scores, strict=True))[: self._params.logprobs or 0]
        is_early = len(beam.tokens) - self.prompt_tokens < self._params.min_tokens
        self._reports[beam] = [
            _Candidate(beam, TokenLogprobs(int(i), score, rank, top), beam.total + score)
            for rank, (i, score) in enumerate(zip(ids, scores, strict=True), 1)
            if not (is_early and int(i) in self._ends)
        ]

    def advance(self, current: Beam, forks: Forks) -> None:
        """When every live beam has reported, choose the next ones. `current` is the one that the loop is at."""
        if self.finished or len(self._reports) < len(self._live):
            return
        candidates = [candidate for found in self._reports.values() for candidate in found]
        self._reports = {}
        candidates.sort(key=lambda c: -c.total)
        length = len(current.tokens) - self.prompt_tokens + 1
        is_full = len(current.tokens) + 1 >= self._ending.max_length
        chosen: list[_Candidate] = []
        for rank, candidate in enumerate(candidates[: max(2, 1 + len(self._ends)) * self.width]):
            is_end = candidate.token.token_id in self._ends
            if is_end or is_full:
                if rank < self.width:
                    logprobs = (*candidate.beam.logprobs, candidate.token)
                    self._complete(logprobs, candidate.total, "stop" if is_end else "length", candidate.token.token_id)
            elif len(chosen) < self.width:
                chosen.append(candidate)
        self._replace_beams(chosen, current, forks)
        if not chosen or self._is_decided(length):
            self._end()
            for beam in self._live:
                if beam is not current:
                    forks.remove(beam)

    def _replace_beams(self, chosen: Sequence[_Candidate], current: Beam, forks: Forks) -> None:
        """A beam that goes on takes its first token in place; its other tokens go on in forks of it."""
        parents, live = self._live, []
        started: set[Beam] = set()
        extensions: list[tuple[Beam, _Candidate]] = []
        for candidate in chosen:
            parent = candidate.beam
            if parent in started:
                logprobs = (*parent.logprobs, candidate.token)
                child = Beam(self, [*parent.tokens, candidate.token.token_id], logprobs, candidate.total)
                forks.fork(parent, child)
                live.append(child)
            else:
                started.add(parent)
                extensions.append((parent, candidate))
                live.append(parent)
        # Only now: the forks above took the parents' tokens as they were.
        for parent, candidate in extensions:
            parent.extend(candidate.token, candidate.total)
            if parent is not current:
                forks.resume(parent)
        for parent in parents:
            if parent not in started:
                parent.finished = True
                if parent is not current:
                    forks.remove(parent)
        self._live = live

    def _is_decided(self, length: int) -> bool:
        if len(self.hypotheses) < self.width:
            return False
        best_live = max(beam.total for beam in self._live) / length**self._params.length_penalty
        return self._params.early_stopping or best_live <= self.hypotheses[-1].score

    def _complete(
        self, logprobs: tuple[TokenLogprobs, ...], total: float, reason: FinishReason, last: int | None
    ) -> None:
        score = total / max(1, len(logprobs)) ** self._params.length_penalty
        stop = last if reason == "stop" and last not in self._ending.eos_ids else None
        tokens = tuple(each.token_id for each in logprobs)
        self.hypotheses.append(Hypothesis(tokens, logprobs, total, score, reason, stop))
        self.hypotheses.sort(key=lambda h: -h.score)
        del self.hypotheses[self.width :]

    def fail(self, error: RequestError) -> None:
        """One beam's logits were not finite."""
        self.error = error
        self._end()

    def _end(self) -> None:
        self.finished = True
        for beam in self._live:
            beam.finished = True


class Beam(Request):
    """One live continuation. logprobs: of its output; total: their sum."""

    def __init__(
        self, search: BeamSearch, tokens: Sequence[int], logprobs: tuple[TokenLogprobs, ...], total: float
    ) -> None:
        origin = search.origin
        super().__init__(
            tokens,
            every_logit=False,
            priority=origin.priority,
            salt=origin.salt,
            arrived=origin.arrived,
            deadline=origin.deadline,
        )
        self.search = search
        self.logprobs = logprobs
        self.total = total

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Tell the search what may follow."""
        best = int(logits[-1].argmax())
        try:
            check_finite(best, float(logits[-1][best]))
        except RequestError as error:
            self.fail(error)
            return self.search.fail(error)
        self.search.report(self, logits[-1])

    def follow(self, forks: Forks) -> None:
        """Let the search go on if this was the last beam that it waited for."""
        if self.search.error is not None:
            for beam in self.search.beams:
                if beam is not self:
                    forks.remove(beam)
        self.search.advance(self, forks)

    def extend(self, token: TokenLogprobs, total: float) -> None:
        """Go on with that token."""
        self.tokens.append(token.token_id)
        self.logprobs = (*self.logprobs, token)
        self.total = total

    def expire(self) -> None:
        """The search's deadline has passed."""
        if not self.search.finished:
            self.search.stop("deadline")
