"""A sequence that reads a text and keeps the one row that the model gives for it, and the job of such a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from llmc.errors import ModelFailureError, RequestError
from llmc.runtime.requests.generation_job import ChoiceResult
from llmc.runtime.requests.request import Origin, Request
from llmc.runtime.requests.request_output import FinishReason, Row


class TextRow(Request):
    """row: [width], fp32, once it has ended by itself; finish_reason says how it has ended."""

    def __init__(self, tokens: Sequence[int], origin: Origin) -> None:
        super().__init__(tokens, every_logit=False, origin=origin)
        self.row: Row | None = None
        self.finish_reason: FinishReason = "stop"

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Keep the last token's row."""
        row = logits[-1].copy()
        if not np.isfinite(row).all():
            place = int(np.flatnonzero(~np.isfinite(row))[0])
            return self.fail(
                ModelFailureError(
                    f"the model gave {row[place]} as number {place} of a text's row",
                    fix="look for NaN and infinity in the checkpoint's weights, and build with dtype=float32",
                )
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


@dataclass(frozen=True)
class RowJob:
    """A GenerationJob of one text: its result has no tokens, and no probabilities of any, but a row."""

    first: TextRow
    prompt_logprobs: ClassVar[None] = None

    @property
    def sequences(self) -> Sequence[TextRow]:
        return (self.first,)

    @property
    def finished(self) -> bool:
        """Whether it has its row, or gets none."""
        return self.first.finished

    @property
    def error(self) -> RequestError | None:
        """Why the row is of no use."""
        return self.first.error

    def stop(self, reason: FinishReason) -> None:
        """End the sequence."""
        self.first.stop(reason)

    def results(self) -> list[ChoiceResult]:
        return [ChoiceResult((), self.first.finish_reason, None, None, None, "", self.first.row)]
