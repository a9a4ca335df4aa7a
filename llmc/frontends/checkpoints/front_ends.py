"""Model directories with safetensors files, of numbers, of codes or without zeros; and those without weights."""

from pathlib import Path

from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.checkpoint_source import CheckpointSource
from llmc.frontends.checkpoints.codes.quantization_config import quantization_of, sparsity_format
from llmc.frontends.checkpoints.directory_files import has_safetensors, read_json
from llmc.frontends.checkpoints.model_directory import model_directory, stored_dtype
from llmc.frontends.checkpoints.quantized import QuantizedSource
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.frontends.checkpoints.sparse import SparseSource
from llmc.frontends.front_end import FrontEnd, OpenedModel
from llmc.frontends.transformers.capture import capture_directory
from llmc.options import BuildOptions


def _holds_codes(directory: Path) -> bool:
    is_described = has_safetensors(directory) and (directory / "config.json").is_file()
    return is_described and quantization_of(directory) is not None


def _holds_masks(directory: Path) -> bool:
    file = directory / "config.json"
    return has_safetensors(directory) and file.is_file() and sparsity_format(read_json(file), file) is not None


def _capture_config(opened: OpenedModel[CheckpointSource], options: BuildOptions, may_lack_weights: bool) -> Captured:
    return capture_directory(opened, options, lacks_weights=may_lack_weights and not any(opened.given.glob("*.bin")))


DENSE = model_directory("safetensors", has_safetensors, SafetensorsSource)
QUANTIZED = model_directory("codes in safetensors", _holds_codes, QuantizedSource)
SPARSE = model_directory("safetensors without zeros", _holds_masks, SparseSource)
# Any other path: config.json is enough for plans and predictions, and capture says what a build lacks.
CONFIG_ALONE: FrontEnd[CheckpointSource] = FrontEnd(
    "config.json without weights",
    recognises=lambda path: True,
    dtype=stored_dtype,
    weights=lambda opened: SafetensorsSource(opened.given),
    capture=_capture_config,
)
