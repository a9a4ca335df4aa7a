"""What a checkpoint of drafting layers gives, whatever its layout, and what it has to fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from llmc.errors import CheckpointError
from llmc.graph.checkpoint import SafetensorsSource
from llmc.graph.weights import Recipe, Stored

# Tensors of a draft's checkpoint in recipes, where the target's are called as they are.
PREFIX = "draft:"
Method = Literal["eagle3", "mtp"]


@dataclass(frozen=True)
class Target:
    """The model that drafts are for. width: of its hidden states. layers: how many it has. embedding, output: the
    recipes of its table of embeddings and of its output matrix, [vocabulary, width]; the same for tied ones."""

    name: str
    width: int
    vocab_size: int
    layers: int
    dtype: torch.dtype
    embedding: Recipe
    output: Recipe

    def shared(self) -> dict[str, Recipe]:
        """The recipes that a draft without tensors of its own takes, by the names of its parameters."""
        return {"embed_tokens.weight": self.embedding, "lm_head.weight": self.output}


@dataclass(frozen=True)
class Combination:
    """How hidden states of several layers become one: fc(concatenation), perhaps normalized before.

    fc: the name of [width, layers · target width]. whole_norm: of one norm over the concatenation; layer_norms: of one
    for each layer. eps: of the norms.
    """

    fc: str
    fc_bias: str | None
    whole_norm: str | None
    layer_norms: tuple[str, ...]
    eps: float


@dataclass(frozen=True)
class DraftModule:
    """module: forward(input_ids, positions, hidden) -> (logits, hidden), with fake parameters. recipes: of its
    parameters. ids: of the target's vocabulary, as offsets of the draft's own ones; None where both have the same."""

    module: nn.Module
    recipes: Mapping[str, Recipe]
    width: int
    vocab_size: int
    id_offsets: str | None


class DraftCheckpoint(Protocol):
    """A draft's directory, opened: its config and the headers of its weights."""

    @property
    def method(self) -> Method:
        """The drafter that its engines are for."""

    @property
    def source(self) -> SafetensorsSource:
        """Its tensors, by the names that recipes have after PREFIX."""

    def taps(self, layers: int, width: int) -> tuple[int, ...] | None:
        """The hidden states that it reads of a target of so many layers, each state so wide: those before these layers,
        `layers` for after the last. None: what the output matrix reads. Raises CheckpointError for another model's."""

    def notes(self, layers: int) -> tuple[str, ...]:
        """What a build should say."""

    def combination(self, target: Target) -> Combination | None:
        """How the tapped states become one; None where there is one. Raises CheckpointError."""

    def modules(self, target: Target) -> tuple[DraftModule, ...]:
        """What drafts: the first of them reads the target's hidden states, each further one those of the one before.
        Raises CheckpointError for those of another model."""


class DraftTensors:
    """A draft checkpoint's tensors by the names that its layout gives them. fix: what to say of what does not fit."""

    def __init__(self, source: SafetensorsSource, target: str) -> None:
        self._source, self._target = source, target
        self._names = frozenset(source.names())

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError if the checkpoint lacks the tensor."""
        if name not in self._names:
            names = sorted(self._names)
            some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise CheckpointError(
                f"the draft's checkpoint has no tensor {name!r}, but {some}",
                at=self._source.directory,
                fix="download the whole checkpoint again, or check that config.json belongs to it",
            )
        return self._source.shape(name)

    def recipe(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Recipe:
        """Of a tensor that has to have this shape. Raises CheckpointError."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(
                f"tensor {name!r} is {list(found)}, where a draft for {self._target} has {list(shape)}",
                at=self._source.entry(name).file,
                fix="take the draft that was trained for this model",
            )
        self._source.check(name, shape, floating=dtype.is_floating_point)
        return Stored(PREFIX + name, dtype)


def parameter_recipes(
    module: nn.Module, tensors: DraftTensors, stored: Mapping[str, str], known: Mapping[str, Recipe]
) -> dict[str, Recipe]:
    """Of every parameter of a draft's module. stored: the checkpoint's name for each prefix of parameters' names, the
    longest of which counts. known: those that are there already, for one because they are the target's."""
    recipes = dict(known)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in known:
            continue
        prefix = max((each for each in stored if name.startswith(each)), key=len)
        recipes[name] = tensors.recipe(
            stored[prefix] + name.removeprefix(prefix), tuple(parameter.shape), parameter.dtype
        )
    return recipes
