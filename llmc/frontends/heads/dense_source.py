"""The weights of Dense modules of sentence-transformers, which are in their own directories next to the model's."""

from collections.abc import Sequence
from pathlib import Path

import torch

from llmc.frontends.checkpoints.joined_source import joined
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.frontends.heads.sentence_modules import DenseModule, sentence_modules
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Recipe, Stored, WeightSource, stored_names


def dense_recipes(dense: Sequence[DenseModule], dtype: torch.dtype) -> dict[str, Recipe]:
    """The recipe of each parameter of the modules, by its name in heads/row_module.py. Raises CheckpointError for a
    wrong shape."""
    recipes: dict[str, Recipe] = {}
    for index, module in enumerate(dense):
        source = SafetensorsSource(module.directory)
        shapes = {"weight": (module.outputs, module.inputs)} | ({"bias": (module.outputs,)} if module.has_bias else {})
        for part, shape in shapes.items():
            source.check(f"linear.{part}", shape, floating=True)
            recipes[f"dense.{index}.0.{part}"] = Stored(f"{_prefix(module)}linear.{part}", dtype)
    return recipes


def with_dense(source: WeightSource, graph: ModelGraph, directory: Path) -> WeightSource:
    """The model's weights, and those of the Dense modules that its graph reads."""
    read = {name for recipe in graph.weights.values() for name in stored_names(recipe)}
    modules = None if graph.info.head is None else sentence_modules(directory)
    for module in () if modules is None else modules.dense:
        if any(name.startswith(_prefix(module)) for name in read):
            source = joined(source, SafetensorsSource(module.directory), _prefix(module))
    return source


def _prefix(module: DenseModule) -> str:
    return f"{module.directory.name}/"
