"""The record of a front end, and a model argument after it was resolved once. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from llmc.errors import LlmcError

if TYPE_CHECKING:
    import torch

    from llmc.frontends.captured import Captured
    from llmc.graph.weights import WeightSource
    from llmc.options import BuildOptions

S = TypeVar("S", bound="WeightSource")


def as_it_is(path: Path) -> Path:
    """The path."""
    return path


@dataclass(frozen=True)
class FrontEnd(Generic[S]):
    """One kind of thing that a model comes from.

    The functions receive an argument that `recognises` has accepted. Front ends of single files import torch
    themselves: commands that do not need it use a file's `place`.

    Args:
        name: The kind, for messages.
        recognises: Whether a model argument is of this kind: a path on this machine, or an object in memory.
        place: The path from which the model is read: the path itself, or a model directory made from it.
        directory: The directory of config.json and the tokenizer; None if there are none.
        dtype: The dtype in which most weights are stored; None if unknown. Raises CheckpointError.
        weights: Its tensors by the names that the model has for them. Reads headers only. Raises CheckpointError.
        capture: The graph at stage captured, the source of its weights, and notes for the build to print. The last
            argument says whether a model without weights will do. Raises CheckpointError, CaptureError.
    """

    name: str
    recognises: Callable[[Any], bool]
    dtype: Callable[[OpenedModel[S]], torch.dtype | None]
    weights: Callable[[OpenedModel[S]], S]
    capture: Callable[[OpenedModel[S], BuildOptions, bool], Captured]
    place: Callable[[Path], Path] = as_it_is
    directory: Callable[[Any], Path | None] = as_it_is


@dataclass(frozen=True)
class OpenedModel(Generic[S]):
    """A model argument and the front end that reads it. Whatever is looked up is kept.

    Args:
        given: Where it is read, or the object in memory.
    """

    front_end: FrontEnd[S]
    given: Any

    @cached_property
    def directory(self) -> Path | None:
        """The directory of config.json and the tokenizer; None if there are none. Raises CheckpointError."""
        return self.front_end.directory(self.given)

    @cached_property
    def weights(self) -> S:
        """The model's tensors; headers are read once. Raises CheckpointError."""
        return self.front_end.weights(self)

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which most weights are stored; None if nothing says, or it cannot be read: capture tells why."""
        try:
            return self.front_end.dtype(self)
        except LlmcError:
            return None
