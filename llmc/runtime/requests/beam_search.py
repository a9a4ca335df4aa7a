"""Beam search: the continuations with the highest sum of log-probabilities, found by keeping the best at each length.

The rules are Hugging Face's (GenerationMixin._beam_search): of the best candidates one that ends the text counts only
if it ranks among the first beam_width; a complete one scores sum / length**length_penalty, its end token included; the
search is over when beam_width are complete and early_stopping is set, or when no live beam can still beat the worst.
Penalties, bias and edits change the log-probabilities by which beams are ranked, as Hugging Face's processors do
there, and not those that are given with the tokens. A stop string ends a beam as an end token does. Beams that share a
beginning share its blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.requests.ending import End, Ending
from llmc.runtime.requests.length_score import Score, length_score
from llmc.runtime.requests.request import Forks, Origin, Request
from llmc.runtime.requests.request_output import ChoiceResult, FinishReason, TokenLogprobs
from llmc.runtime.sampling.logit_edits import LogitEdit, edited
from llmc.runtime.sampling.logprobs import likeliest, log_normalizer
from llmc.runtime.sampling.sampler import nothing_allowed, penalize_output, penalize_repetition
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.sampling.unusable_logits import check_finite
from llmc.runtime.sampling.written_tokens import Written
from llmc.runtime.text.output_text import OutputText


@dataclass(frozen=True)
class _Candidate:
    """A beam and a token after it. total: the sum of logprobs of the whole, by which beams are ranked."""

    beam: "Beam"
    token: TokenLogprobs
    total: float

    def text(self, *, may_stop: bool) -> OutputText | None:
        """The beam's text with the token, where stop strings are looked for."""
        if self.beam.text is None:
            return None
        text = self.beam.text.fork()
        text.add(self.token.token_id, may_stop=may_stop)
        return text


class BeamSearch:
    """A GenerationJob; its beams are sequences of the scheduler, and wait for each other at every length.

    text: an empty one that knows the stop strings, if there are any. edits: what changes a beam's logits by its tokens.
    dtype: the engine's. Log-probabilities of the prompt are not given.
    """

    prompt_logprobs = None

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        ending: Ending,
        origin: Origin,
        text: OutputText | None = None,
        edits: Sequence[LogitEdit] = (),
        *,
        dtype: str = "float32",
    ) -> None:
        self.dtype = dtype
        assert params.beam_width is not None
        self.width = params.beam_width
        # The complete ones and what they are ranked by, best first.
        self._hypotheses: list[tuple[Score, ChoiceResult]] = []
        self.finished = False
        self.error: RequestError | None = None
        self.prompt_tokens = len(prompt)
        self.origin = origin
        self.first = Beam(self, list(prompt), (), 0.0, text)
        self._params = params
        self._edits = edits
        self._changes = bool(params.changes_logits() or edits)
        self._ending = ending
        self._ends = ending.end_ids
        self._live: list[Beam] = [self.first]
        self._reports: dict[Beam, list[_Candidate]] = {}

    @property
    def sequences(self) -> "tuple[Beam, ...]":
        return tuple(self._live)

    def results(self) -> list[ChoiceResult]:
        """The best hypotheses first."""
        return [result for _, result in self._hypotheses[: self._params.n]]

    def stop(self, reason: FinishReason) -> None:
        """End the search with its current beams: the complete ones, then the live ones."""
        for beam in self._live:
            self._complete(beam.logprobs, beam.total, End(reason), beam.text)
        self._end()

    def report(self, beam: "Beam", logits: npt.NDArray[np.float32]) -> None:
        """Take the logits after a live beam: [vocabulary]. Raises RequestError."""
        normalizer = log_normalizer(logits)
        ranked = self._ranked_by(beam, logits - np.float32(normalizer)) if self._changes else logits
        offset = 0.0 if ranked is not logits else normalizer
        # Enough that width of them go on, even if every end token is among them (as Hugging Face keeps).
        ids = likeliest(ranked, max(2, 1 + len(self._ends)) * self.width)
        top = tuple((int(i), float(logits[i]) - normalizer) for i in likeliest(logits, self._params.logprobs or 0))
        may_stop = self._ending.may_stop(len(beam.tokens) - self.prompt_tokens + 1)
        self._reports[beam] = [
            _Candidate(
                beam,
                TokenLogprobs(int(i), float(logits[i]) - normalizer, 1 + int((logits > logits[i]).sum()), top),
                beam.total + float(ranked[i]) - offset,
            )
            for i in ids
            if np.isfinite(ranked[i]) and (may_stop or int(i) not in self._ends)
        ]

    def _ranked_by(self, beam: "Beam", scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Log-probabilities after penalties, bias and edits: [vocabulary]; `scores` is changed."""
        params = self._params
        if params.repetition_penalty != 1.0:
            penalize_repetition(scores, np.unique(beam.tokens), params)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = np.unique(np.array(beam.tokens[self.prompt_tokens :], np.int64), return_counts=True)
            penalize_output(scores, ids, counts, params)
        for token, bias in params.logit_bias.items():
            scores[token] += np.float32(bias)
        return edited(scores, self._edits, Written(np.array(beam.tokens, np.int64), self.prompt_tokens))

    def advance(self, current: "Beam", forks: Forks) -> None:
        """Choose the next beams when every live beam has reported. `current` is the beam that the loop is at. Raises
        RequestError."""
        if self.finished or len(self._reports) < len(self._live):
            return
        candidates = [candidate for report in self._reports.values() for candidate in report]
        self._reports = {}
        if not candidates and not self._hypotheses:
            raise nothing_allowed(self._params)
        candidates.sort(key=lambda c: -c.total)
        length = len(current.tokens) - self.prompt_tokens + 1
        may_stop = self._ending.may_stop(length)
        chosen: list[tuple[_Candidate, OutputText | None]] = []
        for rank, candidate in enumerate(candidates[: max(2, 1 + len(self._ends)) * self.width]):
            token, text = candidate.token.token_id, candidate.text(may_stop=may_stop)
            stop_string = None if text is None else text.stopped_by
            end = self._ending.after(token, len(current.tokens) + 1, self.prompt_tokens, stop_string, False)
            if end is not None:
                if rank < self.width:
                    self._complete((*candidate.beam.logprobs, candidate.token), candidate.total, end, text)
            elif len(chosen) < self.width:
                chosen.append((candidate, text))
        self._replace_beams(chosen, current, forks)
        if not chosen or self._is_decided(length):
            self._end()
            # The loop detects that `current` has finished.
            for beam in self._live:
                if beam is not current:
                    forks.remove(beam)

    def _replace_beams(
        self, chosen: Sequence[tuple[_Candidate, OutputText | None]], current: "Beam", forks: Forks
    ) -> None:
        """A beam that goes on takes its first token in place; its other tokens continue in forks of it."""
        parents, live = self._live, []
        started: set[Beam] = set()
        extensions: list[tuple[Beam, _Candidate, OutputText | None]] = []
        for candidate, text in chosen:
            parent = candidate.beam
            if parent in started:
                logprobs = (*parent.logprobs, candidate.token)
                child = Beam(self, [*parent.tokens, candidate.token.token_id], logprobs, candidate.total, text)
                forks.fork(parent, child)
                live.append(child)
            else:
                started.add(parent)
                extensions.append((parent, candidate, text))
                live.append(parent)
        # Only now: the forks above took the parents' tokens as they were.
        for parent, candidate, text in extensions:
            parent.extend(candidate.token, candidate.total, text)
            if parent is not current:
                forks.resume(parent)
        for parent in parents:
            if parent not in started:
                parent.end()
                if parent is not current:
                    forks.remove(parent)
        self._live = live

    def _is_decided(self, length: int) -> bool:
        if len(self._hypotheses) < self.width:
            return False
        best_live = max(beam.total for beam in self._live)
        best_score = length_score(best_live, length, self._params.length_penalty)
        return self._params.early_stopping or best_score <= self._hypotheses[-1][0]

    def _complete(
        self,
        logprobs: tuple[TokenLogprobs, ...],
        total: float,
        end: End,
        text: OutputText | None,
    ) -> None:
        score = length_score(total, max(1, len(logprobs)), self._params.length_penalty)
        if text is not None:
            text.finish()
        hypothesis = ChoiceResult(
            token_ids=tuple(logprob.token_id for logprob in logprobs),
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            logprobs=None if self._params.logprobs is None else logprobs,
            cumulative_logprob=sum(logprob.logprob for logprob in logprobs),
            text=None if text is None else text.text(),
        )
        self._hypotheses.append((score, hypothesis))
        self._hypotheses.sort(key=lambda scored: scored[0], reverse=True)
        del self._hypotheses[self.width :]

    def _end(self) -> None:
        self.finished = True
        for beam in self._live:
            beam.end()


class Beam(Request):
    """One live continuation. logprobs: the logprobs of its output. total: their sum, after penalties and bias."""

    def __init__(
        self,
        search: BeamSearch,
        tokens: Sequence[int],
        logprobs: tuple[TokenLogprobs, ...],
        total: float,
        text: OutputText | None,
    ) -> None:
        super().__init__(tokens, every_logit=False, origin=search.origin, prompt_length=search.prompt_tokens)
        self.search = search
        self.logprobs = logprobs
        self.total = total
        self.text = text

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Report the beam's candidates to the search."""
        best = int(logits[-1].argmax())
        check_finite(best, float(logits[-1][best]), self.search.dtype)
        self.search.report(self, logits[-1])

    def follow(self, forks: Forks) -> None:
        """Let the search go on if this was the last beam that it waited for."""
        self.search.advance(self, forks)

    def fail(self, error: RequestError) -> None:
        """The search fails with any of its beams."""
        super().fail(error)
        self.search.error = error
        self.search.finished = True

    def extend(self, token: TokenLogprobs, total: float, text: OutputText | None) -> None:
        """Continue with that token. text: with it."""
        self.tokens.append(token.token_id)
        self.logprobs = (*self.logprobs, token)
        self.total = total
        self.text = text

    def expire(self) -> None:
        """Stop the search, whose deadline has passed."""
        if not self.search.finished:
            self.search.stop("deadline")
