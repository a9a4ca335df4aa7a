"""Capture: any way of giving a decoder language model becomes one graph at stage captured, and a source of weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram

from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource
from llmc.options import BuildOptions

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)


@dataclass(frozen=True)
class Captured:
    """graph: at stage captured. source: where its Stored recipes read. tokenizer_files: to be copied to the engine."""

    graph: ModelGraph
    source: WeightSource
    tokenizer_files: tuple[Path, ...] = ()


def capture(model: str | Path | nn.Module | ExportedProgram, options: BuildOptions) -> Captured:
    """Capture a model directory, a transformers model, a plain module or an exported program.

    The graph takes input_ids and positions, both [1, T] int64, and returns logits [1, T, vocab]; T is symbolic.
    Weight data is not read. Raises CheckpointError for a broken directory, CaptureError for a model that cannot be
    traced or is not a decoder language model.
    """
    from llmc.graph.capture_hf import capture_directory

    directory = Path(model)
    graph, source = capture_directory(directory, options)
    files = tuple(directory / name for name in TOKENIZER_FILES if (directory / name).is_file())
    return Captured(graph, source, files)
