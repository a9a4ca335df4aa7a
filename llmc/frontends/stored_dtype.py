"""The dtype that a model is stored in, looked up before anything is captured."""

from os import PathLike
from pathlib import Path

import torch
from torch import nn
from torch.export import ExportedProgram

from llmc.errors import LlmcError
from llmc.frontends.checkpoints.safetensors import SafetensorsSource, read_json
from llmc.frontends.onnx.files import onnx_file
from llmc.frontends.onnx.source import onnx_dtype
from llmc.graph.dtype_names import NAMED_DTYPES


def stored_dtype(model: str | Path | nn.Module | ExportedProgram) -> torch.dtype | None:
    """Of weights, as capture would keep it; None for what has none, or cannot be read: capture will say why."""
    if isinstance(model, nn.Module):
        return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if not isinstance(model, str | PathLike):
        return None
    directory = Path(model)
    try:
        onnx = onnx_file(directory)
        if onnx is not None:
            return onnx_dtype(onnx)
        settings = read_json(directory / "config.json")
        text = settings.get("text_config")
        for each in (text if isinstance(text, dict) else {}, settings):
            named = each.get("dtype") or each.get("torch_dtype")
            if isinstance(named, str) and named in NAMED_DTYPES:
                return NAMED_DTYPES[named]
        return SafetensorsSource(directory).dtype()
    except LlmcError:
        return None
