"""Model directories that transformers describes, by how their weights are stored. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.files.hub_model import HubFiles
from llmc.frontends.checkpoints.directory_files import has_safetensors, read_json
from llmc.frontends.front_end import FrontEnd, OpenedModel, as_it_is

if TYPE_CHECKING:
    import torch

    from llmc.frontends.captured import Captured
    from llmc.frontends.checkpoints.checkpoint_source import CheckpointSource
    from llmc.options import BuildOptions


def model_directory(
    name: str,
    recognises: Callable[[Path], bool],
    weights: Callable[[Path], CheckpointSource],
    *,
    place: Callable[[Path], Path] = as_it_is,
    hub: HubFiles | None = None,
) -> FrontEnd[CheckpointSource]:
    """The front end of directories with a config.json that transformers reads.

    Args:
        name, place, hub: As in FrontEnd.
        recognises: Whether a path is such a directory, or becomes one by `place`.
        weights: The tensors of a directory. Raises CheckpointError.
    """
    return FrontEnd(
        name,
        recognises=lambda model: isinstance(model, Path) and recognises(model),
        dtype=_dtype,
        weights=lambda opened: weights(opened.given),
        capture=_capture,
        place=place,
        hub=hub,
    )


def _dtype(opened: OpenedModel[CheckpointSource]) -> torch.dtype | None:
    """That of config.json, else of most numbers that are stored."""
    from llmc.graph.dtype_names import NAMED_DTYPES

    settings = read_json(opened.given / "config.json")
    text = settings.get("text_config")
    for each in (text if isinstance(text, dict) else {}, settings):
        named = each.get("dtype") or each.get("torch_dtype")
        if isinstance(named, str) and named in NAMED_DTYPES:
            return NAMED_DTYPES[named]
    return opened.weights.dtype()


def _capture(opened: OpenedModel[CheckpointSource], options: BuildOptions, may_lack_weights: bool) -> Captured:
    from llmc.frontends.transformers.capture import capture_directory

    return capture_directory(opened, options)


def _capture_config(opened: OpenedModel[CheckpointSource], options: BuildOptions, may_lack_weights: bool) -> Captured:
    from llmc.frontends.transformers.capture import capture_directory

    return capture_directory(opened, options, lacks_weights=may_lack_weights and not any(opened.given.glob("*.bin")))


def _dense(directory: Path) -> CheckpointSource:
    from llmc.frontends.checkpoints.safetensors import SafetensorsSource

    return SafetensorsSource(directory)


def _is_quantized(directory: Path) -> bool:
    from llmc.frontends.checkpoints.quantization_config import is_quantized

    file = directory / "config.json"
    return has_safetensors(directory) and file.is_file() and is_quantized(read_json(file), file)


def _quantized(directory: Path) -> CheckpointSource:
    from llmc.frontends.checkpoints.quantized import QuantizedSource

    return QuantizedSource(directory)


def _is_sparse(directory: Path) -> bool:
    from llmc.frontends.checkpoints.quantization_config import sparsity_format

    file = directory / "config.json"
    return has_safetensors(directory) and file.is_file() and sparsity_format(read_json(file), file) is not None


def _sparse(directory: Path) -> CheckpointSource:
    from llmc.frontends.checkpoints.sparse import SparseSource

    return SparseSource(directory)


DENSE = model_directory(
    "safetensors",
    has_safetensors,
    _dense,
    # Directories of other formats (onnx/, original/) and weights that stand there twice are left out.
    hub=HubFiles(("*.safetensors",), left_out=("*/*", "consolidated*.safetensors")),
)
QUANTIZED = model_directory("codes in safetensors", _is_quantized, _quantized)
SPARSE = model_directory("safetensors without zeros", _is_sparse, _sparse)
# Any other path: config.json alone does for plans and predictions, and capture says what a build lacks.
CONFIG_ALONE = FrontEnd(
    "config.json without weights",
    recognises=lambda model: isinstance(model, Path),
    dtype=_dtype,
    weights=lambda opened: _dense(opened.given),
    capture=_capture_config,
)
