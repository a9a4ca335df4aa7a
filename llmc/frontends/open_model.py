"""Look at a model argument once: fetch what the hub has, and choose the front end that reads it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import CaptureError
from llmc.files.hub_model import fetched_model
from llmc.frontends.front_end import FrontEnd, OpenedModel
from llmc.frontends.front_ends import OF_OBJECTS, OF_PATHS, front_ends, hub_files

if TYPE_CHECKING:
    from llmc.frontends.captured import Model


def open_model(model: Model | OpenedModel[Any]) -> OpenedModel[Any]:
    """The model and the front end that reads it; weights of a hub name are fetched first.

    An open model is returned unchanged. Raises CheckpointError if the hub does not have the model or a file is damaged,
    CaptureError if no front end reads it.
    """
    if isinstance(model, OpenedModel):
        return model
    source = _fetched(model, weights=True) if isinstance(model, str | PathLike) else model
    front_end = _front_end(source)
    return OpenedModel(front_end, front_end.place(source) if isinstance(source, Path) else source)


def local_model(model: str | PathLike[str], *, weights: bool = True) -> Path:
    """Return the path of a model on this machine: a path as it is, the snapshot of a hub name, or the directory that is
    made of a single file.

    Args:
        weights: False fetches only what describes the model.

    Raises:
        CheckpointError: If a file is damaged, or if the hub lacks the model or denies access.
    """
    place = _fetched(model, weights=weights)
    # Directories are read where they are, so nothing is imported to recognise them.
    return _front_end(place).place(place) if place.is_file() or not place.exists() else place


def _fetched(model: str | PathLike[str], *, weights: bool) -> Path:
    return fetched_model(model, hub_files() if weights else ())


def _front_end(given: object) -> FrontEnd[Any]:
    rows = OF_PATHS if isinstance(given, Path) else OF_OBJECTS
    front_end = next((candidate for candidate in front_ends(rows) if candidate.recognises(given)), None)
    if front_end is None:
        raise CaptureError(
            f"cannot compile a {type(given).__name__}",
            fix="pass a model directory, a transformers model, an nn.Module or an ExportedProgram",
        )
    return front_end
