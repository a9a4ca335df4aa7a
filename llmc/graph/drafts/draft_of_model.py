"""What the option `speculative` names, put to a captured model: the checkpoint of what drafts for it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from llmc.errors import OptionError
from llmc.graph.drafts.draft_checkpoint import DraftCheckpoint
from llmc.graph.drafts.open_draft import open_draft
from llmc.options import OWN_LAYERS


def draft_of_model(model: object, speculative: str) -> DraftCheckpoint:
    """Raises CheckpointError for a directory without a draft, OptionError for a model that has no directory."""
    if speculative != OWN_LAYERS:
        return open_draft(Path(speculative))
    if not isinstance(model, str | PathLike):
        raise OptionError(
            f"speculative='{OWN_LAYERS}' reads the model's directory, and the model is a {type(model).__name__}",
            at="speculative",
            fix="name the directory of the checkpoint that holds them",
        )
    return open_draft(Path(model))
