"""Two kinds of sequence: Generation makes one choice of an answer, Scoring gives the logits of a text."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmc.program import CachePolicy
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.request import Forks, Origin, Request, SampledRequest
from llmc.runtime.requests.request_output import FinishReason, TokenLogprobs
from llmc.runtime.sampling.logprobs import token_logprobs
from llmc.runtime.sampling.row_choice import RowChoice
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.unusable_logits import check_finite, unusable_logits
from llmc.runtime.text.output_text import OutputText


class Generation(SampledRequest):
    """One choice: samples a token from the last token's logits until it has to stop.

    text: the output's text if stop strings are searched for, otherwise None. logprobs: one per token of the output,
    with the given number of alternatives, or None. finish_reason: None until the end. prompt_logprobs: those from the
    prompt's second token on. siblings: the other choices; they start when this one, the first, has computed the prompt.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        ending: Ending,
        *,
        origin: Origin,
        index: int = 0,
        text: OutputText | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        siblings: "Sequence[Generation]" = (),
    ) -> None:
        super().__init__(prompt, sampler, every_logit=prompt_logprobs is not None, origin=origin)
        self.is_steady = not siblings and prompt_logprobs is None and ending.max_length > len(prompt)
        self.index = index
        self.prompt_tokens = len(self.tokens)
        self.text = text
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.logprobs: list[TokenLogprobs] | None = None if logprobs is None else []
        self.reads_logits = logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._logprob_count = logprobs or 0
        self._prompt_logprob_count = prompt_logprobs or 0
        self._ending = ending
        self._siblings = tuple(siblings)
        self._forks: list[Generation] = []
        self._ends = ending.end_ids
        self.most = ending.max_length
        self._may_complete = sampler.has_mask

    @property
    def output(self) -> tuple[int, ...]:
        """The generated tokens."""
        return tuple(self.tokens[self.prompt_tokens :])

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the output's tokens, if they have log-probabilities."""
        return None if self.logprobs is None else sum(logprob.logprob for logprob in self.logprobs)

    @property
    def choice(self) -> RowChoice | None:
        """The sampler's choice of the next token, unless its probability is requested."""
        return self.sampler.choice() if self.is_steady and self.logprobs is None else None

    def accept(self, token: int, logits: npt.NDArray[np.float32] | None) -> None:
        """Append the token, and see whether it is the last."""
        if logits is not None:
            self._note(token, logits)
        if self.text is not None or self._may_complete:
            return self._append(token)
        self.tokens.append(token)
        if token in self._ends or len(self.tokens) >= self.most:
            self._end(token)

    def _note(self, token: int, logits: npt.NDArray[np.float32]) -> None:
        if self.logprobs is not None:
            self.logprobs.append(token_logprobs(logits, token, self._logprob_count))

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        if self.text is not None:
            self.text.add(token, may_stop=self._ending.may_stop(len(self.tokens) - self.prompt_tokens))
        self._end(token)

    def _end(self, token: int) -> None:
        """Finish if the output ends with its last token."""
        stop_string = None if self.text is None else self.text.stopped_by
        is_complete = self._may_complete and self.sampler.is_complete
        end = self._ending.after(token, len(self.tokens), self.prompt_tokens, stop_string, is_complete)
        if end is not None:
            self._finish(*end)

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """The prompt's logits, and from the last of them every choice's first token."""
        for row, position in zip(logits, range(start + 1, self.prompt_tokens), strict=False):
            best = int(row.argmax())
            if not np.isfinite(row[best]):
                raise unusable_logits(best, float(row[best]), self.sampler.dtype)
            logprobs = token_logprobs(row, self.tokens[position], self._prompt_logprob_count)
            self.prompt_logprobs.append(logprobs)
        if start + len(logits) < len(self.tokens):
            return
        for choice in (self, *self._siblings):
            choice.start(logits)
        self._forks = [choice for choice in self._siblings if not choice.finished]
        self._siblings = ()

    def start(self, logits: npt.NDArray[np.float32]) -> None:
        """Choose the first token from the last row of the prompt's logits."""
        self.is_steady = True
        if len(self.tokens) >= self.most:
            # Other requests will find the blocks, although no token is needed.
            best = int(logits[-1].argmax())
            check_finite(best, float(logits[-1][best]), self.sampler.dtype)
            return self._finish("length", None)
        token = self.sampler.sample(logits[-1])
        self._note(token, logits[-1])
        self._append(token)

    def follow(self, forks: Forks) -> None:
        """Put the other choices on this one's blocks."""
        for choice in self._forks:
            forks.fork(self, choice)
        self._forks = []

    def expire(self) -> None:
        """End with the current output."""
        self.stop("deadline")

    def stop(self, reason: FinishReason) -> None:
        """End with the current output, together with the choices that wait for this one."""
        for choice in (self, *self._siblings):
            if not choice.finished:
                choice._finish(reason, None)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.end()
        if self.text is not None:
            self.text.finish()


class Scoring(Request):
    """Gathers the logits after each token: `logits` [tokens, vocabulary], fp32, complete when finished."""

    def __init__(
        self,
        tokens: Sequence[int],
        vocab_size: int,
        adapter: PlacedAdapter | None = None,
        policy: CachePolicy | None = None,
        instruction: tuple[int, ...] = (),
    ) -> None:
        origin = Origin(salt=None, adapter=adapter, policy=policy, instruction=instruction)
        super().__init__(tokens, every_logit=True, origin=origin)
        self.logits = np.empty((len(self.tokens), vocab_size), np.float32)

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Keep the rows."""
        self.logits[start : start + len(logits)] = logits
        if start + len(logits) == len(self.tokens):
            self.end()
