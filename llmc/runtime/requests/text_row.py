"""A sequence that reads a text and keeps the one row that the model gives for it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmc.errors import ModelFailureError
from llmc.runtime.requests.request import Origin, Request
from llmc.runtime.requests.request_output import ChoiceResult, FinishReason, Row


class TextRow(Request):
    """A GenerationJob for one text. Its result has no tokens and no probabilities but a row, [width] in fp32, once it
    has finished. finish_reason is the reason why it ended."""

    prompt_logprobs = None

    def __init__(self, tokens: Sequence[int], origin: Origin) -> None:
        super().__init__(tokens, every_logit=False, origin=origin)
        self.row: Row | None = None
        self.finish_reason: FinishReason = "stop"

    @property
    def first(self) -> "TextRow":
        return self

    @property
    def sequences(self) -> "tuple[TextRow]":
        return (self,)

    def results(self) -> list[ChoiceResult]:
        return [ChoiceResult((), self.finish_reason, None, None, None, "", self.row)]

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Keep the last token's row."""
        row = logits[-1].copy()
        if not np.isfinite(row).all():
            place = int(np.flatnonzero(~np.isfinite(row))[0])
            raise ModelFailureError(
                f"the model gave {row[place]} as number {place} of a text's row",
                fix="look for NaN and infinity in the checkpoint's weights, and build with dtype=float32",
            )
        self.row = row
        self.end()

    def expire(self) -> None:
        """End without a row."""
        self.stop("deadline")

    def stop(self, reason: FinishReason) -> None:
        """End without a row, if it has none."""
        if not self.finished:
            self.finish_reason = reason
            self.end()
