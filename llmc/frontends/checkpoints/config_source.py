"""The weights of a model directory that has none: what config.json says of them, for plans and predictions."""

from pathlib import Path

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Stored


class ConfigSource:
    """A WeightSource whose tensors are on torch's meta device: shapes and dtypes, no numbers.

    graph: as it was captured.
    """

    def __init__(self, directory: Path, graph: ModelGraph) -> None:
        self.directory = directory
        self._tensors: dict[str, Tensor] = {}
        for node in graph.weight_nodes():
            value, recipe = node.meta["val"], graph.weights[node.name]
            if isinstance(recipe, Stored):
                self._tensors[recipe.name] = torch.empty(tuple(value.shape), dtype=recipe.dtype, device="meta")

    def names(self) -> tuple[str, ...]:
        """The names of tensors in the model, sorted."""
        return tuple(sorted(self._tensors))

    def load(self, name: str) -> Tensor:
        """Return an empty tensor with the weight's shape and dtype. Raises CheckpointError for a name that the model
        does not read."""
        if name not in self._tensors:
            raise CheckpointError(f"the model has no tensor {name!r}", at=self.directory)
        return self._tensors[name]


def config_dtype(config: object) -> torch.dtype:
    """The dtype in the config; bfloat16 if it has none."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
