"""How a checkpoint directory stores its weights, dense, as codes, without their zeros, or in a GGUF file."""

from pathlib import Path

from llmc.graph.checkpoint import SafetensorsSource, read_json
from llmc.graph.gguf.model_directory import gguf_files
from llmc.graph.gguf.source import GgufSource
from llmc.graph.quantization_config import is_quantized
from llmc.graph.quantized_checkpoint import QuantizedSource
from llmc.graph.sparse_checkpoint import SparseSource, sparsity_format

ModelSource = SafetensorsSource | QuantizedSource | SparseSource | GgufSource


def open_checkpoint(directory: Path) -> ModelSource:
    """The source of a directory with config.json; reads headers. Raises CheckpointError."""
    if gguf_files(directory):
        return GgufSource(directory)
    config = directory / "config.json"
    settings = read_json(config)
    if sparsity_format(settings, config) is not None:
        return SparseSource(directory)
    return QuantizedSource(directory) if is_quantized(settings, config) else SafetensorsSource(directory)
