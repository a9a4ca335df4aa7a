"""The two kinds of request: Generation makes text, Scoring gives the logits of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.output_text import OutputText
from llmc.runtime.request import Request
from llmc.runtime.request_output import FinishReason
from llmc.runtime.sampler import Sampler


class Generation(Request):
    """Samples a token from the last token's logits until it has to stop.

    stop_ids: tokens that end the output (the last of it). max_length: of prompt and output together. text: grows with
    the output where someone reads it or a stop string is looked for, else None. finish_reason: "stop" for a stop
    token or string, "length" for max_length, None until then. error: why it cannot go on, None if it can.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        *,
        stop_ids: frozenset[int],
        max_length: int,
        text: OutputText | None,
    ) -> None:
        super().__init__(prompt, every_logit=False)
        self.prompt_tokens = len(self.tokens)
        self.text = text
        self.finish_reason: FinishReason | None = None
        self.error: RequestError | None = None
        self._sampler = sampler
        self._stop_ids = stop_ids
        self._max_length = max_length

    @property
    def output(self) -> tuple[int, ...]:
        """The tokens generated so far."""
        return tuple(self.tokens[self.prompt_tokens :])

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Choose the next token, and see whether it is the last."""
        self._append(lambda: self._sampler.sample(logits[0]))

    @property
    def greedy(self) -> bool:
        """Whether the sampler takes the likeliest token as it is."""
        return self._sampler.is_argmax

    def receive_best(self, token: int, logit: float) -> None:
        """Take the likeliest token, and see whether it is the last."""
        self._append(lambda: self._sampler.accept(token, logit))

    def _append(self, choose: Callable[[], int]) -> None:
        try:
            token = choose()
        except RequestError as error:
            self.error = error
            self.finished = True
            return
        self.tokens.append(token)
        if self.text is not None:
            self.text.add(token)
        if token in self._stop_ids or (self.text is not None and self.text.stopped):
            self._finish("stop")
        elif len(self.tokens) >= self._max_length:
            self._finish("length")

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.finished = True
        if self.text is not None:
            self.text.finish()


class Scoring(Request):
    """Gathers the logits after each token: `logits` [tokens, vocabulary], fp32, complete when finished."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        super().__init__(tokens, every_logit=True)
        self.logits = np.empty((len(self.tokens), vocab_size), np.float32)

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Keep the rows."""
        self.logits[start : start + len(logits)] = logits
        self.finished = start + len(logits) == len(self.tokens)
