"""A captured model: its graph, the source of its weights, and the files of its tokenizer."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram

from llmc.errors import CheckpointError
from llmc.files.tokenizer_files import SETTINGS, SPECIAL_TOKENS, TOKENIZER, tokenizer_files
from llmc.frontends.checkpoints.directory_files import read_json_if_there
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource

# A path, a name on the hub, a transformers model, a module from token ids to logits, or an exported one.
Model = str | PathLike[str] | nn.Module | ExportedProgram


@dataclass(frozen=True)
class Captured:
    """A captured model. graph: at stage captured. source: where its Stored recipes read. notes: what a build should say
    of the model. tokenizer_files: to be copied to the engine."""

    graph: ModelGraph
    source: WeightSource
    notes: tuple[str, ...] = ()
    tokenizer_files: tuple[Path, ...] = ()

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer itself, if the model has one in the tokenizers library's format."""
        return next((file for file in self.tokenizer_files if file.name == TOKENIZER), None)


def checked_tokenizer_files(directory: Path) -> tuple[Path, ...]:
    """The files of a directory that an engine keeps. Raises CheckpointError for those that it could not read later."""
    check_tokenizer(directory)
    return tokenizer_files(directory)


def check_tokenizer(directory: Path) -> None:
    """Raise CheckpointError now for a tokenizer, or settings of one, that the engine could not read later."""
    for name in (SETTINGS, SPECIAL_TOKENS):
        read_json_if_there(directory / name)
    file = directory / TOKENIZER
    if not file.is_file():
        return
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises a bare Exception for a file that it cannot parse.
        raise CheckpointError(
            f"the tokenizer cannot be read: {error}",
            at=file,
            fix="download the checkpoint again, or remove the file: without it prompts are token ids",
        ) from None
