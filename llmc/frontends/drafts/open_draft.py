"""Open the checkpoint of the option `speculative`, by the layout of its directory."""

from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError, OptionError
from llmc.frontends.checkpoints.directory_files import read_json
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.frontends.drafts.eagle3 import Eagle3Checkpoint, read_eagle3
from llmc.frontends.drafts.medusa import holds_medusa, read_medusa
from llmc.frontends.drafts.mtp import deepseek_mtp, has_mtp, qwen_mtp
from llmc.frontends.drafts.speculators import KIND, read_speculators
from llmc.frontends.front_end import OpenedModel
from llmc.graph.draft_records import MedusaCheckpoint
from llmc.graph.model_graph import DraftCheckpoint
from llmc.options import OWN_LAYERS


def draft_of_model(model: OpenedModel[Any], speculative: str) -> DraftCheckpoint | MedusaCheckpoint:
    """Open the draft that a model names. Raises CheckpointError if it is not a draft checkpoint, OptionError if the
    model has no directory."""
    if holds_medusa(Path(speculative)):
        return read_medusa(Path(speculative))
    if speculative != OWN_LAYERS:
        return open_draft(Path(speculative))
    if model.directory is None:
        raise OptionError(
            f"speculative='{OWN_LAYERS}' reads the model's directory, and the model is a {type(model.given).__name__}",
            at="speculative",
            fix="name the directory of the checkpoint that holds them",
        )
    return open_draft(model.directory)


def open_draft(directory: Path) -> DraftCheckpoint:
    """The draft in a directory, by its config and its tensors' names. Raises CheckpointError."""
    source = _weights(directory)
    names = source.names()
    if KIND in read_json(directory / "config.json"):
        return Eagle3Checkpoint(read_speculators(directory), source)
    if "fc.weight" in names and any(name.startswith(("midlayer.", "layers.0.")) for name in names):
        return Eagle3Checkpoint(read_eagle3(directory), source)
    if any(name.startswith("mtp.") for name in names):
        return qwen_mtp(source)
    if has_mtp(source):
        return deepseek_mtp(source)
    raise CheckpointError(
        f"these tensors are not those of known draft layers: {', '.join(names[:4])}, …",
        at=directory,
        fix="name the directory of an EAGLE-3 draft, or of a model with MTP layers (mtp.*, model.layers.N.eh_proj)",
    )


def _weights(directory: Path) -> SafetensorsSource:
    """Open the safetensors of a draft. Raises CheckpointError, which for pickle files has the command that converts
    them."""
    if not directory.is_dir():
        raise CheckpointError(
            "the draft's directory does not exist", at=directory, fix="name the one that holds its config.json"
        )
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickles and not any(directory.glob("*.safetensors")):
        raise CheckpointError(
            f"the draft's weights are a pickle ({pickles[0]}), which llmc does not open",
            at=directory / pickles[0],
            fix=f"convert it: python -c \"import torch, safetensors.torch as s; s.save_file(torch.load('{pickles[0]}',"
            " weights_only=True), 'model.safetensors')\"",
        )
    return SafetensorsSource(directory)
