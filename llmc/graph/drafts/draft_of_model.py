"""What the option `speculative` names of a model: the checkpoint of what drafts for it."""

from os import PathLike
from pathlib import Path

from llmc.errors import OptionError
from llmc.graph.drafts.draft_checkpoint import DraftCheckpoint
from llmc.graph.drafts.medusa import MedusaCheckpoint, holds_medusa, read_medusa
from llmc.graph.drafts.open_draft import open_draft
from llmc.graph.local_model import local_model
from llmc.options import OWN_LAYERS


def draft_of_model(model: object, speculative: str) -> DraftCheckpoint | MedusaCheckpoint:
    """Raises CheckpointError for what is no draft, OptionError for a model that has no directory."""
    if holds_medusa(Path(speculative)):
        return read_medusa(Path(speculative))
    if speculative != OWN_LAYERS:
        return open_draft(Path(speculative))
    if not isinstance(model, str | PathLike):
        raise OptionError(
            f"speculative='{OWN_LAYERS}' reads the model's directory, and the model is a {type(model).__name__}",
            at="speculative",
            fix="name the directory of the checkpoint that holds them",
        )
    return open_draft(local_model(model))
