"""A graph's model and weights as two files: weights are streamed, one in memory at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch

from llmc.codegen.onnx.contrib_ops import coded_products, packed_codes, packed_weight
from llmc.codegen.onnx.genai_model import CONFIG_NAME, genai_config, make_genai_model
from llmc.codegen.onnx.graph_model import Place, graph_model, place_weights
from llmc.codegen.onnx.weights import onnx_weights, stored_elements
from llmc.engine_format.engine_kinds import MODEL_NAME
from llmc.engine_format.reader import EngineDirectory
from llmc.engine_format.weight_file import header
from llmc.errors import LoweringError
from llmc.files.storage_error import storage_error
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource, evaluate
from llmc.program import WeightSlot

# The weights are in the format of safetensors, which tells more than bare bytes would.
WEIGHTS_NAME = "weights.safetensors"
# A model of more cannot be one file, as protobuf has it.
_LARGEST_MODEL = 2**31 - 1


@dataclass(frozen=True)
class WrittenModel:
    """An ONNX model that was written. nodes: calls of the graph; functions: which they are calls of; the rest in
    bytes."""

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
    products = coded_products(graph) if for_genai else ()
    bits = {part.name: product.bits for product in products for part in product.packed}
    weights = [
        packed_weight(weight, bits[weight.slot.name]) if weight.slot.name in bits else weight
        for weight in onnx_weights(graph)
    ]
    model = graph_model(graph, weights)
    if for_genai:
        make_genai_model(model, graph)

    def elements(slot: WeightSlot) -> memoryview:
        weight = evaluate(graph.weights[slot.name], source)
        weight = packed_codes(weight, bits[slot.name]) if slot.name in bits else weight
        return stored_elements(weight, slot).view(torch.uint8).numpy().data

    written = _write(model, [weight.slot for weight in weights], elements, directory, advance)
    if for_genai:
        try:
            (directory / CONFIG_NAME).write_text(genai_config(graph), encoding="utf-8")
        except OSError as error:
            raise storage_error(error, directory / CONFIG_NAME, 0, content="the model") from None
    return written


def copy_engine_model(engine: EngineDirectory, directory: Path, advance: Callable[[int], None]) -> WrittenModel:
    """Write MODEL_NAME and WEIGHTS_NAME of an engine for onnxruntime: its model and weights, unchanged.

    advance: called with the bytes of each weight.
    """
    stored = {slot.name: entry for slot, entry in zip(engine.program.weights, engine.tensors, strict=True)}

    def elements(slot: WeightSlot) -> memoryview:
        tensor = stored[slot.name]
        return engine.weight_file(tensor)[tensor.begin : tensor.end]

    model = onnx.load_from_string(engine.executable.read_bytes())
    return _write(model, engine.program.weights, elements, directory, advance)


def _write(
    model: onnx.ModelProto,
    slots: Sequence[WeightSlot],
    elements: Callable[[WeightSlot], memoryview],
    directory: Path,
    advance: Callable[[int], None],
) -> WrittenModel:
    head, gaps = header(slots)
    places, offset = dict[str, Place](), len(head)
    for slot, gap in zip(slots, gaps, strict=True):
        places[slot.name] = Place(WEIGHTS_NAME, offset + gap, slot.nbytes)
        offset += gap + slot.nbytes
    place_weights(model, places)
    content = serialized(model)
    path = directory / WEIGHTS_NAME
    try:
        with path.open("wb") as file:
            file.write(head)
            for slot, gap in zip(slots, gaps, strict=True):
                file.write(bytes(gap))
                file.write(elements(slot))
                advance(slot.nbytes)
        (directory / MODEL_NAME).write_bytes(content)
    except OSError as error:
        raise storage_error(error, path, offset, content="the model") from None
    return WrittenModel(len(model.graph.node), len(model.functions), len(content), offset)


def serialized(model: onnx.ModelProto) -> bytes:
    """The model's bytes, the same for the same graph. Raises LoweringError for more than protobuf holds."""
    if model.ByteSize() > _LARGEST_MODEL:
        raise LoweringError(f"the graph without weights takes {model.ByteSize()} bytes, more than protobuf allows")
    return bytes(model.SerializeToString(deterministic=True))
