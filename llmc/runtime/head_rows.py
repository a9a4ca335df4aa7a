"""Turn the rows that a model computes for texts into vectors, scores or label probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.program import Activation, Head, Similarity
from llmc.runtime.requests.request_output import Row

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Classification:
    """How well labels fit a text. scores: the scores of all labels, in the model's order. label: the one that fits
    best."""

    label: str
    scores: Row

    def __repr__(self) -> str:
        return f"Classification({self.label!r}, {float(self.scores.max()):.4f})"


def embedding(head: Head, row: Row, dimensions: int | None = None, normalize: bool | None = None) -> Row:
    """A text's vector. dimensions: number of leading elements to keep, for Matryoshka models. normalize: scale to
    length 1; None follows the model's modules. Raises RequestError for more dimensions than the vector has."""
    if dimensions is not None:
        if type(dimensions) is not int or not 1 <= dimensions <= head.width:
            raise RequestError(
                f"dimensions cannot be {dimensions!r}", at="dimensions", fix=f"give a whole number 1 to {head.width}"
            )
        row = row[:dimensions]
    return scaled(row) if (head.normalized if normalize is None else normalize) else row


def scaled(row: Row) -> Row:
    """Scale vectors to length 1; a zero vector stays unchanged."""
    length = float(np.sqrt(np.square(row, dtype=np.float64).sum()))
    unit_row: Row = row if length == 0 else (row / length).astype(np.float32)
    return unit_row


def similarity(head: Head, one: Row, other: Row) -> float:
    """The similarity of two texts' vectors, by their model's measure."""
    first, second = (embedding(head, row) for row in (one, other))
    if head.similarity is Similarity.COSINE:
        first, second = scaled(first), scaled(second)
    first, second = first.astype(np.float64), second.astype(np.float64)
    if head.similarity is Similarity.EUCLIDEAN:
        return -float(np.linalg.norm(first - second))
    if head.similarity is Similarity.MANHATTAN:
        return -float(np.abs(first - second).sum())
    return float(np.dot(first, second))


def activated(head: Head, row: Row, activation: bool = True) -> Row:
    """A classifier's or scorer's numbers as probabilities, by the head's own activation; as they are without."""
    if not activation or head.activation is Activation.IDENTITY:
        return row
    wide = row.astype(np.float64)
    if head.activation is Activation.SIGMOID:
        return (0.5 * (1 + np.tanh(0.5 * wide))).astype(np.float32)
    powers = np.exp(wide - wide.max())
    probabilities: Row = (powers / powers.sum()).astype(np.float32)
    return probabilities


def classification(head: Head, row: Row, activation: bool = True) -> Classification:
    """The classification of one text."""
    scores = activated(head, row, activation)
    return Classification(head.labels[int(scores.argmax())], scores)


def stacked(rows: Sequence[Row], width: int) -> Rows:
    """[texts, width], also of no texts."""
    return np.stack(rows) if rows else np.empty((0, width), np.float32)
