"""Capture of an ONNX file: its graph as a decoder over whole sequences, at stage captured, and its tensors' source."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from llmc.errors import CaptureError
from llmc.files.hub_model import model_name
from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.directory_files import read_json_if_there
from llmc.frontends.onnx.call import Known
from llmc.frontends.onnx.coded_tensor import CodedTensor
from llmc.frontends.onnx.constants import constant, is_known
from llmc.frontends.onnx.decoder import OnnxDecoder
from llmc.frontends.onnx.files import describing
from llmc.frontends.onnx.model import OnnxGraph
from llmc.frontends.onnx.needed import positional_tensors
from llmc.frontends.onnx.source import OnnxSource
from llmc.frontends.tracing.fake_copy import make_parameters_fake
from llmc.frontends.tracing.program_graph import graph_from_program
from llmc.frontends.tracing.trace import trace
from llmc.frontends.transformers.config import model_info, resolve_dtype, stated_tokens
from llmc.graph.dtype_names import torch_name
from llmc.graph.model_graph import ModelInfo
from llmc.graph.weights import Constant, Recipe, Stored, identifier
from llmc.options import BuildOptions

_HALVES = (torch.float16, torch.bfloat16)


def capture_onnx(source: OnnxSource, options: BuildOptions) -> Captured:
    """Trace the graph of a file; data of weights are not read. Raises CheckpointError, CaptureError."""
    read = read_decoder(source, options)
    program = trace(read.decoder, with_positions=True)
    return Captured(graph_from_program(program, read.recipes, read.info, prefix="tensors."), source, read.notes)


@dataclass(frozen=True)
class ReadDecoder:
    """A file as a module of fake weights. recipes: the recipes of its tensors, by the module's names without
    `tensors.`"""

    decoder: OnnxDecoder
    recipes: dict[str, Recipe]
    info: ModelInfo
    notes: tuple[str, ...]


def read_decoder(source: OnnxSource, options: BuildOptions) -> ReadDecoder:
    """Make a module of a file; nothing is computed. Raises CheckpointError, CaptureError."""
    parsed, file, own = source.parsed, source.file, source.dtype()
    dtype = _dtype(options, own, file)
    positional = positional_tensors(parsed.graph, parsed.interface.ids)
    kept = _Tensors(parsed.graph, parsed.coded, positional, {own: dtype})
    decoder = OnnxDecoder(
        parsed.model,
        parsed.graph,
        parsed.interface,
        kept.module,
        kept.names,
        kept.known,
        {own: dtype},
        options.max_model_len,
    )
    make_parameters_fake(decoder)
    info, notes = _info(file, parsed.settings, dtype)
    return ReadDecoder(decoder, kept.recipes, info, notes)


class _Tensors:
    """The graph's tensors as a module: parameters for weights, buffers for values that passes read.

    names: the names of values in the module, by those in the graph. known: values that are numbers. recipes: the
    recipes by names in the module.
    """

    def __init__(
        self,
        graph: OnnxGraph,
        coded: dict[str, CodedTensor],
        positional: frozenset[str],
        dtypes: dict[torch.dtype, torch.dtype],
    ) -> None:
        self.module = nn.Module()
        self.names: dict[str, str] = {}
        self.known: dict[str, Known] = {}
        self.recipes: dict[str, Recipe] = {}
        self._dtypes = dtypes
        parts = {part.name for weight in coded.values() for part in weight.parts}
        for name, codes in coded.items():
            (own,) = dtypes
            self._weight(name, (codes.rows, codes.columns), own)
        for name, tensor in graph.tensors.items():
            if name in parts:
                continue
            value = constant(tensor) if is_known(tensor) else None
            if value is not None and not isinstance(value, torch.Tensor):
                self.known[name] = value
            elif name in positional or not tensor.dtype.is_floating_point:
                self._constant(name, tensor.load())
            else:
                self._weight(name, tensor.shape, tensor.dtype)

    def _weight(self, name: str, shape: tuple[int, ...], stored: torch.dtype) -> None:
        dtype, attribute = self._dtypes.get(stored, stored), self._attribute(name)
        empty = torch.empty(shape, dtype=dtype, device="meta")
        self.module.register_parameter(attribute, nn.Parameter(empty, requires_grad=False))
        self.recipes[attribute] = Stored(name, dtype)

    def _constant(self, name: str, value: torch.Tensor) -> None:
        attribute = self._attribute(name)
        value = value.to(self._dtypes.get(value.dtype, value.dtype))
        self.module.register_buffer(attribute, value)
        self.recipes[attribute] = Constant(value, (name,))

    def _attribute(self, name: str) -> str:
        attribute = identifier(name) or "tensor"
        while hasattr(self.module, attribute):
            attribute = f"{attribute}_{len(self.names)}"
        self.names[name] = attribute
        return attribute


def _dtype(options: BuildOptions, own: torch.dtype, file: Path) -> torch.dtype:
    """The dtype of the engine: the graph's own; another one is allowed only in place of half precision."""
    dtype = resolve_dtype(options, own, file)
    if dtype is not own and own not in _HALVES:
        raise CaptureError(
            f"the graph computes in {torch_name(own)}, and what it does not cast is meant to be in that",
            at=f"dtype={options.dtype}",
            fix="leave dtype=auto, or export the model in that dtype; quantize=int8 makes its weights smaller",
        )
    return dtype


def _info(file: Path, settings: dict[str, Any], dtype: torch.dtype) -> tuple[ModelInfo, tuple[str, ...]]:
    """Read the model's info from files in the same directory: genai_config.json, config.json, generation_config.json;
    all are optional."""
    folder = describing(file)
    config = read_json_if_there(folder / "config.json")
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    vocabulary = settings.get("vocab_size", config.get("vocab_size"))
    limit = settings.get("context_length", config.get("max_position_embeddings", config.get("n_positions")))
    sizes = SimpleNamespace(
        model_type=str(config.get("model_type", settings.get("type", "onnx"))),
        vocab_size=vocabulary if vocabulary is not None else 1 << 31,
        max_position_embeddings=limit,
    )
    name = model_name(folder) if file.stem == "model" else file.stem
    return model_info(name, sizes, (settings, *stated_tokens(folder)), dtype)
