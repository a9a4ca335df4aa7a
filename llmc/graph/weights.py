"""Where the data of a weight placeholder comes from: a recipe over checkpoint tensors, evaluated late, one at a time.

Graphs hold no weight data. A pass that folds `1 + weight`, merges Q, K and V, or transposes a Conv1D weight changes
the recipe; the build evaluates it when that weight is written, so memory holds one weight at a time.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class WeightSource(Protocol):
    """The tensors of a checkpoint, loaded one at a time (memory-mapped where it is a file)."""

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, sorted."""

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU in its stored dtype; raises CheckpointError if it is missing or broken."""


class ShapedSource(WeightSource, Protocol):
    """A WeightSource whose shapes are known before anything is loaded."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; raises CheckpointError if there is none of that name."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint tensor, cast to `dtype` when loaded."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor computed at capture, by constant folding or by a pass. made_of: the checkpoint tensors that it replaces,
    if reports need them."""

    value: Tensor
    made_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Derived:
    """`target(*args, **kwargs)`, where any argument (also inside a tuple) may itself be a recipe."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class PerRank:
    """Another tensor of the same shape and dtype for each rank of a partitioned model."""

    recipes: "tuple[Recipe, ...]"


Recipe = Stored | Constant | Derived | PerRank


def evaluate(recipe: Recipe, source: WeightSource, rank: int = 0) -> Tensor:
    """The tensor that a recipe stands for, on a rank."""
    if isinstance(recipe, PerRank):
        return evaluate(recipe.recipes[rank], source, rank)
    if isinstance(recipe, Stored):
        return source.load(recipe.name).to(recipe.dtype)
    if isinstance(recipe, Constant):
        return recipe.value

    def value(argument: Any) -> Any:
        return evaluate(argument, source, rank) if isinstance(argument, Recipe) else argument

    args, kwargs = tree_map(value, (recipe.args, dict(recipe.kwargs)))
    result: Tensor = recipe.target(*args, **kwargs)
    return result


def renamed(recipe: Recipe, names: Mapping[str, str]) -> Recipe:
    """Rename the stored tensors of a recipe. names: another source's name by each name in the recipe."""
    if isinstance(recipe, Stored):
        return replace(recipe, name=names[recipe.name])
    if isinstance(recipe, PerRank):
        return PerRank(tuple(renamed(shard, names) for shard in recipe.recipes))
    if isinstance(recipe, Constant):
        return recipe

    def argument(value: Any) -> Any:
        return renamed(value, names) if isinstance(value, Recipe) else value

    return Derived(recipe.target, *tree_map(argument, (recipe.args, recipe.kwargs)))


def identifier(name: str) -> str:
    """A placeholder's name from a checkpoint name: "model.layers.0.mlp" becomes "model_layers_0_mlp"."""
    cleaned = re.sub(r"\W", "_", name)
    return f"_{cleaned}" if cleaned[:1].isdigit() else cleaned


def is_per_rank(recipe: Recipe) -> bool:
    """Whether a recipe gives ranks different tensors."""
    return any(map(is_per_rank, _operands(recipe))) if isinstance(recipe, Derived) else isinstance(recipe, PerRank)


def stored_names(recipe: Recipe) -> tuple[str, ...]:
    """The checkpoint tensors that a recipe reads or stands for, in order, for reports and comments."""
    if isinstance(recipe, Stored):
        return (recipe.name,)
    if isinstance(recipe, Constant):
        return recipe.made_of
    if isinstance(recipe, PerRank):
        return tuple(dict.fromkeys(name for shard in recipe.recipes for name in stored_names(shard)))
    return tuple(name for operand in _operands(recipe) for name in stored_names(operand))


def _operands(recipe: Derived) -> list[Recipe]:
    """The recipes among its arguments, also inside tuples, in order."""
    return [leaf for leaf in tree_leaves((recipe.args, recipe.kwargs)) if isinstance(leaf, Recipe)]
