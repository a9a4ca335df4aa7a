"""The weight converters of transformers as recipes: the changes it makes to a checkpoint's tensors on loading.

Directories on the hub hold a tensor for each expert where the model has one for all, projections in one where it has
three, or rows in another order. transformers expresses this in converters, which are code. They are run here on tensors
without data, and the recorded torch operations become the recipes of the results.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from llmc.errors import CheckpointError
from llmc.graph.weights import Derived, Recipe, Stored

aten = torch.ops.aten


@dataclass(frozen=True)
class Converted:
    """A tensor that transformers' converters compute. recipe: the recipe of one of the model's tensors. shape: the
    shape that it yields. sources: the checkpoint's tensors in it."""

    recipe: Recipe
    shape: tuple[int, ...]
    sources: tuple[str, ...]


def converted_tensors(model: Any, stored: Mapping[str, tuple[int, ...]], at: Path) -> dict[str, Converted]:
    """Return the tensors that converters compute from others, by their names in the model. stored: shapes in the
    checkpoint.

    Raises CheckpointError for tensors that a converter does not take.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    if not converters:
        return {}
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors = model.state_dict()
    collected: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, tensors)
        if pattern is not None and renamed in tensors and name not in tensors:
            _, sources = collected.setdefault(renamed, (by_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(name)
    result: dict[str, Converted] = {}
    for first, (converter, sources) in collected.items():
        result |= _convert(model, first, converter, sources, stored, tensors, at)
    return result


def _convert(
    model: Any,
    first: str,
    converter: Any,
    sources: Mapping[str, list[str]],
    stored: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    at: Path,
) -> dict[str, Converted]:
    """first: the first of the model's tensors that come out, or the only one."""
    names = tuple(name for group in sources.values() for name in group)
    recorder = _Recorder()
    dtype = tensors[first].dtype
    converter = copy.deepcopy(converter)
    converter.collected_tensors = {
        pattern: [recorder.stored(name, stored[name], dtype) for name in group] for pattern, group in sources.items()
    }
    try:
        with recorder:
            converted = converter.convert(first, model=model, config=model.config)
    except Exception as error:  # Whatever transformers' code meets with tensors that it did not expect.
        raise CheckpointError(
            f"transformers cannot make {first} from {len(names)} stored tensors ({names[0]}, …): {error}",
            at=at,
            fix="check that config.json belongs to these weights and that all shards are there",
        ) from None
    by_name = {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
    return {
        name: Converted(recorder.recipe(value), tuple(value.shape), names)
        for name, value in by_name.items()
        if name in tensors
    }


class _Recorder(TorchDispatchMode):
    """While it is entered, operations on tensors that it knows are done without data, and remembered as a recipe."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By identity: the tensors are kept, so that none takes another's place.
        self._recipes: dict[int, tuple[Tensor, Recipe]] = {}

    def stored(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A placeholder for a tensor of the checkpoint."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._recipes[id(tensor)] = tensor, Stored(name, dtype)
        return tensor

    def recipe(self, tensor: Tensor) -> Recipe:
        """The recipe of a stored tensor, or of one computed from stored tensors."""
        return self._recipes[id(tensor)][1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            keywords = tuple((name, self._argument(value)) for name, value in sorted((kwargs or {}).items()))
            recipe = Derived(func, self._argument(args), keywords)
            self._recipes[id(result)] = result, recipe
        else:
            parts = _PARTS[func]
            for index, part in enumerate(result):
                recipe = Derived(*parts(self._argument(args[0]), index, args, result))
                self._recipes[id(part)] = part, recipe
        return result

    def _argument(self, value: Any) -> Any:
        def recipe(argument: Any) -> Any:
            return self.recipe(argument) if isinstance(argument, Tensor) else argument

        mapped = tree_map(recipe, value)
        return tuple(mapped) if isinstance(mapped, list) else mapped


def _slice(source: Recipe, index: int, args: tuple[Any, ...], parts: Any) -> tuple[Any, tuple[Any, ...]]:
    dim = args[2] if len(args) > 2 else 0
    start = sum(part.shape[dim] for part in parts[:index])
    return aten.slice.Tensor, (source, dim, start, start + parts[index].shape[dim])


def _select(source: Recipe, index: int, args: tuple[Any, ...], parts: Any) -> tuple[Any, tuple[Any, ...]]:
    return aten.select.int, (source, args[1] if len(args) > 1 else 0, index)


_PARTS: Mapping[Any, Callable[..., tuple[Any, tuple[Any, ...]]]] = {
    aten.split.Tensor: _slice,
    aten.split_with_sizes.default: _slice,
    aten.unbind.int: _select,
}
