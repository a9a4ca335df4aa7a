"""Capture: any way of giving a decoder language model becomes one graph at stage captured, and a source of weights."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram

from llmc.errors import CaptureError, CheckpointError
from llmc.files.tokenizer_files import SETTINGS, TOKENIZER, tokenizer_files
from llmc.graph.adaptable_layers import adaptable_layers
from llmc.graph.capture_hf import capture_directory, capture_pretrained
from llmc.graph.capture_module import capture_module
from llmc.graph.capture_program import capture_program
from llmc.graph.checkpoint import read_json
from llmc.graph.drafts.draft_checkpoint import PREFIX
from llmc.graph.drafts.medusa import MedusaCheckpoint
from llmc.graph.drafts.open_draft import draft_of_model
from llmc.graph.joined_source import JoinedSource
from llmc.graph.local_model import local_model
from llmc.graph.merge_adapter import merge_adapters
from llmc.graph.model_graph import ModelGraph
from llmc.graph.onnx.capture import capture_onnx
from llmc.graph.onnx.files import describing, onnx_file
from llmc.graph.weights import WeightSource
from llmc.options import BuildOptions

# A directory, a transformers model, a module from token ids to logits, or an exported one.
Model = str | Path | nn.Module | ExportedProgram


@dataclass(frozen=True)
class Captured:
    """graph: at stage captured. source: where its Stored recipes read. notes: what a build should say of the model.
    tokenizer_files: to be copied to the engine."""

    graph: ModelGraph
    source: WeightSource
    notes: tuple[str, ...] = ()
    tokenizer_files: tuple[Path, ...] = ()

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer itself, if the model has one in the tokenizers library's format."""
        return next((file for file in self.tokenizer_files if file.name == TOKENIZER), None)


def capture(model: Model, options: BuildOptions, *, may_lack_weights: bool = False) -> Captured:
    """Capture a model directory, a transformers model, a plain module or an exported program.

    The graph takes input_ids and positions, both [1, T] int64, and returns logits [1, T, vocab]; T is symbolic.
    Weight data is not read. may_lack_weights: a directory may hold config.json alone; then nobody can read weights
    later. With options.speculative the checkpoint of what drafts is opened, too; with options.lora adapters are merged
    into the recipes. Raises CheckpointError for a broken directory, CaptureError for a model that cannot be traced or
    is not a decoder language model.
    """
    # Before the model, which takes longer.
    draft = None if options.speculative is None else draft_of_model(model, options.speculative)
    with _without_garbage_collection():
        captured = _capture(model, options, may_lack_weights)
    if options.enable_lora:
        captured = replace(captured, graph=replace(captured.graph, adaptable=adaptable_layers(captured.graph)))
    if options.lora:
        captured = replace(captured, graph=merge_adapters(captured.graph, options.adapters))
    if draft is None:
        return captured
    if isinstance(draft, MedusaCheckpoint):
        graph = replace(captured.graph, medusa=draft)
    else:
        graph = replace(captured.graph, speculative=draft)
    return replace(captured, graph=graph, source=JoinedSource(captured.source, draft.source, PREFIX))


def _capture(model: Model, options: BuildOptions, may_lack_weights: bool) -> Captured:
    if isinstance(model, ExportedProgram):
        return Captured(*capture_program(model, options))
    if isinstance(model, nn.Module):
        return Captured(*(capture_pretrained if _is_pretrained(model) else capture_module)(model, options))
    if not isinstance(model, str | PathLike):
        raise CaptureError(
            f"cannot compile a {type(model).__name__}",
            fix="pass a model directory, a transformers model, an nn.Module or an ExportedProgram",
        )
    directory = local_model(model)
    onnx = onnx_file(directory)
    if onnx is not None:
        directory = describing(onnx)
    files = tokenizer_files(directory)
    check_tokenizer(directory)
    if onnx is not None:
        return Captured(*capture_onnx(onnx, options), files)
    return Captured(*capture_directory(directory, options, may_lack_weights=may_lack_weights), files)


def check_tokenizer(directory: Path) -> None:
    """Raise CheckpointError now for a tokenizer, or settings of one, that the engine could not read later."""
    if (directory / SETTINGS).is_file():
        read_json(directory / SETTINGS)
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


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the cycle collector: importing transformers and tracing make a million objects that stay, and walking
    them again and again took a quarter of the time (3.4 s for 4.4 s of a 6-layer model, imports included)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_pretrained(module: nn.Module) -> bool:
    """Whether it is a transformers model, without importing transformers for one that is not."""
    if not any(base.__module__.startswith("transformers.") for base in type(module).__mro__):
        return False
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)
