"""Tensors that a checkpoint holds several times and that may differ, such as the output matrix and the embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.checkpoint_source import CheckpointSource

# Elements that are compared at once: what differs mostly differs at the start.
_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Copies:
    """Two stored tensors that stand for one of the model's, and whether they are equal."""

    first: str
    second: str
    are_equal: bool


def compared(pairs: Sequence[tuple[str, str]], source: CheckpointSource) -> tuple[Copies, ...]:
    """Read both tensors of each pair and compare them."""
    return tuple(Copies(first, second, _are_equal(first, second, source)) for first, second in pairs)


def refuse_different(copies: Sequence[Copies], source: CheckpointSource) -> None:
    """Raise CheckpointError for copies that differ and that the model cannot have apart."""
    for copy in copies:
        if not copy.are_equal:
            raise CheckpointError(
                f"{copy.first!r} and {copy.second!r} are one tensor in the model and differ in the checkpoint",
                at=source.directory,
                fix="remove the one that does not belong to the model",
            )


def _are_equal(first: str, second: str, source: CheckpointSource) -> bool:
    if source.shape(first) != source.shape(second):
        return False
    left, right = source.load(first), source.load(second)
    return all(_same(a, b) for a, b in zip(_parts(left), _parts(right), strict=True))


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.reshape(-1), _ELEMENTS)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype is b.dtype:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a.double(), b.double())
