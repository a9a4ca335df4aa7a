"""How a checkpoint directory stores its weights, dense, as codes, without their zeros, or in a GGUF file."""

from pathlib import Path

from llmc.frontends.checkpoints.quantization_config import is_quantized
from llmc.frontends.checkpoints.quantized import QuantizedSource
from llmc.frontends.checkpoints.safetensors import SafetensorsSource, read_json
from llmc.frontends.checkpoints.sparse import SparseSource, sparsity_format
from llmc.frontends.gguf.model_directory import gguf_files
from llmc.frontends.gguf.source import GgufSource

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
