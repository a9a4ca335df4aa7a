"""One decoder layer of a checkpoint, put as the only one of a model: by the names that such a model's tensors have."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.frontends.transformers.names import stored_recipes
from llmc.graph.draft_records import PREFIX
from llmc.graph.weights import Recipe, renamed


class RenamedLayer:
    """A StoredShapes. layer, norm: what the checkpoint's names of its tensors, and of those of the norm after it,
    begin with; here they are those of `layers.0.` and `norm.`. others: the beginnings of the names of other tensors,
    which it leaves out."""

    def __init__(self, source: SafetensorsSource, layer: str, norm: str, others: Collection[str]) -> None:
        self._source, self._layer = source, layer
        self._names = {
            prefix + name.removeprefix(stored): name
            for stored, prefix in ((layer, "layers.0."), (norm, "norm."))
            for name in source.names()
            if name.startswith(stored) and not (stored == layer and name.startswith(tuple(others)))
        }

    @property
    def directory(self) -> Path:
        """The directory of the checkpoint."""
        return self._source.directory

    @property
    def has_experts(self) -> bool:
        """Whether its feed-forward part is a mixture of experts."""
        return any(".experts." in name for name in self._names)

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, sorted."""
        return tuple(sorted(self._names))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def check(self, name: str, shape: tuple[int, ...], *, floating: bool) -> None:
        self._source.check(self._names[name], shape, floating=floating)

    def recipes(self, decoder: Any) -> dict[str, Recipe]:
        """The recipes of a transformers decoder that consists of this layer and the norm, by its names.

        Tensors are merged as transformers merges them, such as those of experts. Raises CheckpointError for missing
        tensors, other shapes, and unused tensors.
        """
        layer = self._layer.removesuffix(".")
        try:
            read = stored_recipes(decoder, self)
        except CheckpointError as error:
            raise CheckpointError(f"{layer}, here layers.0: {error.problem}", at=error.at, fix=error.fix) from None
        if read.notes:
            raise CheckpointError(
                f"the layer {layer} is not one of {decoder.config.model_type!r}: {read.notes[0]}",
                at=self.directory,
                fix="build without speculative, and let a draft model or n-grams speculate",
            )
        stored = {name: PREFIX + kept for name, kept in self._names.items()}
        return {name: renamed(recipe, stored) for name, recipe in read.recipes.items()}
