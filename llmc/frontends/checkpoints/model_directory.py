"""Front ends of model directories that transformers describes, whatever stores their weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.frontends.checkpoints.directory_files import read_json
from llmc.frontends.front_end import FrontEnd, OpenedModel, as_it_is

if TYPE_CHECKING:
    import torch

    from llmc.frontends.captured import Captured
    from llmc.frontends.checkpoints.checkpoint_source import CheckpointSource
    from llmc.options import BuildOptions


def model_directory(
    name: str,
    recognises: Callable[[Path], bool],
    weights: Callable[[Path], CheckpointSource],
    *,
    place: Callable[[Path], Path] = as_it_is,
) -> FrontEnd[CheckpointSource]:
    """The front end of directories with a config.json that transformers reads.

    Args:
        name, place: As in FrontEnd.
        recognises: Whether a path is such a directory, or becomes one by `place`.
        weights: The tensors of a directory. Raises CheckpointError.
    """
    return FrontEnd(
        name,
        recognises,
        dtype=stored_dtype,
        weights=lambda opened: weights(opened.given),
        capture=_capture,
        place=place,
    )


def stored_dtype(opened: OpenedModel[CheckpointSource]) -> torch.dtype | None:
    """The dtype of config.json, else that of most of the stored numbers."""
    from llmc.graph.dtype_names import NAMED_DTYPES

    settings = read_json(opened.given / "config.json")
    text = settings.get("text_config")
    for section in (text if isinstance(text, dict) else {}, settings):
        named = section.get("dtype") or section.get("torch_dtype")
        if isinstance(named, str) and named in NAMED_DTYPES:
            return NAMED_DTYPES[named]
    return opened.weights.dtype()


def _capture(opened: OpenedModel[CheckpointSource], options: BuildOptions, may_lack_weights: bool) -> Captured:
    from llmc.frontends.transformers.capture import capture_directory

    return capture_directory(opened, options)
