"""The interface of all sources of a model directory's weights."""

from pathlib import Path
from typing import Protocol

import torch

from llmc.graph.weights import WeightSource


class StoredShapes(Protocol):
    """The tensors of a checkpoint, by its headers, under the model's names."""

    @property
    def directory(self) -> Path:
        """The model directory."""

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; raises CheckpointError if there is none of that name."""

    def check(self, name: str, shape: tuple[int, ...], *, floating: bool) -> None:
        """Raise CheckpointError unless the tensor has this shape and, if asked, a floating-point type."""


class CheckpointSource(StoredShapes, WeightSource, Protocol):
    """The tensors of a model directory. Opening one reads headers only."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the files for a build to print."""

    def dtype(self) -> torch.dtype:
        """The dtype in which most numbers are stored. Raises CheckpointError if there are none."""

    def headers(self) -> list[tuple[object, ...]]:
        """Names, types and shapes as the files have them: what a capture depends on, as JSON can hold it."""
