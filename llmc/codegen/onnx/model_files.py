"""A graph's model and weights as two files: weights are streamed, one in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch

from llmc.codegen.onnx.genai_model import CONFIG_NAME, genai_config, make_genai_model
from llmc.codegen.onnx.graph_model import Place, graph_model, place_weights
from llmc.codegen.onnx.weights import onnx_weights, stored_elements
from llmc.engine_format.reader import MODEL_NAME
from llmc.engine_format.weight_file import header
from llmc.errors import LoweringError
from llmc.files.storage_error import storage_error
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource, evaluate

# The weights are in the format of safetensors, which tells more than bare bytes would.
WEIGHTS_NAME = "weights.safetensors"
# A model of more cannot be one file, as protobuf has it.
_LARGEST_MODEL = 2**31 - 1


@dataclass(frozen=True)
class WrittenModel:
    """nodes: calls of the graph; functions: which they are calls of; the rest in bytes."""

    nodes: int
    functions: int
    model_bytes: int
    weight_bytes: int


def write_model_files(
    graph: ModelGraph,
    source: WeightSource,
    directory: Path,
    advance: Callable[[int], None],
    *,
    for_genai: bool = False,
) -> WrittenModel:
    """Write MODEL_NAME and WEIGHTS_NAME. advance: told the bytes of each weight. for_genai: as onnxruntime-genai runs
    it, with its config.

    Raises LoweringError for an op that standard ops cannot say, before anything is written, and EngineFormatError for a
    disk that fills up.
    """
    weights = onnx_weights(graph)
    head, gaps = header([weight.slot for weight in weights])
    places, offset = dict[str, Place](), len(head)
    for weight, gap in zip(weights, gaps, strict=True):
        offset += gap
        places[weight.slot.name] = Place(WEIGHTS_NAME, offset, weight.slot.nbytes)
        offset += weight.slot.nbytes
    model = graph_model(graph, weights)
    place_weights(model, places)
    if for_genai:
        make_genai_model(model, graph)
    content = serialized(model)
    path = directory / WEIGHTS_NAME
    try:
        with path.open("wb") as file:
            file.write(head)
            for weight, gap in zip(weights, gaps, strict=True):
                slot = weight.slot
                elements = stored_elements(evaluate(graph.weights[slot.name], source), slot)
                file.write(bytes(gap))
                file.write(elements.view(torch.uint8).numpy().data)
                advance(slot.nbytes)
        (directory / MODEL_NAME).write_bytes(content)
        if for_genai:
            (directory / CONFIG_NAME).write_text(genai_config(graph), encoding="utf-8")
    except OSError as error:
        raise storage_error(error, path, offset, content="the model") from None
    return WrittenModel(len(model.graph.node), len(model.functions), len(content), offset)


def serialized(model: onnx.ModelProto) -> bytes:
    """The model's bytes, the same for the same graph. Raises LoweringError for more than protobuf holds."""
    if model.ByteSize() > _LARGEST_MODEL:
        raise LoweringError(f"the graph alone takes {model.ByteSize()} bytes, more than protobuf holds")
    return bytes(model.SerializeToString(deterministic=True))
