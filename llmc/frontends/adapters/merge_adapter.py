"""LoRA adapters merged into a model: recipes of the weights that they change, evaluated while the build writes them.

    W  ->  W + scale·B·A, computed in fp32 and rounded once to W's dtype; a table's is transposed.
A tied weight that only one of its readers is adapted in is untied, as it was in training: PEFT computes with two
weights then, and says that merging them in place is not the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor, fx

from llmc.adapters.adapter import Adapter, LoraModule, read_adapter
from llmc.adapters.module_name import tail
from llmc.errors import AdapterError
from llmc.frontends.adapters.adaptable_layers import WEIGHT_ON_THE_RIGHT
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Constant, Derived, Recipe, Stored, identifier, stored_names

aten = torch.ops.aten
_LOOKUPS = frozenset({aten.embedding.default})
_HEADS = ("lm_head", "embed_out", "output")
_OF_TOKENS = (*_HEADS, "embed_tokens", "wte", "embed_in", "word_embeddings")


def merge_adapters(graph: ModelGraph, directories: Mapping[str, Path]) -> ModelGraph:
    """The captured graph with each adapter in its weights, in order. directories: by the adapters' names.

    Raises AdapterError for one that cannot be read, or that was made for another model.
    """
    merged = graph.copy()
    for directory in directories.values():
        _merge(merged, read_adapter(directory))
    return merged


@dataclass(frozen=True)
class _Place:
    """The weight of a module, and those that read it as that module."""

    weight: fx.Node
    readers: tuple[fx.Node, ...]


def _merge(graph: ModelGraph, adapter: Adapter) -> None:
    for name, tensor in adapter.whole.items():
        place = _find(graph, name, adapter, is_table=name.startswith("embed"))
        value = torch.from_numpy(adapter.file.load(tensor))
        shape = list(place.weight.meta["val"].shape)
        if list(value.shape) != shape:
            if name in _OF_TOKENS and list(value.shape[1:]) == shape[1:]:
                raise _other_tokens(adapter, tensor, len(value), shape[0])
            raise _another_model(adapter, f"{tensor} is {list(value.shape)}, but the model has {shape}")
        dtype = place.weight.meta["val"].dtype
        _replace(graph, place, Constant(value.to(dtype), stored_names(graph.weights[place.weight.name])))
    for name, module in adapter.modules.items():
        place = _find(graph, name, adapter, is_table=module.is_table)
        _replace(graph, place, _sum(graph, place, module, adapter))


def _sum(graph: ModelGraph, place: _Place, module: LoraModule, adapter: Adapter) -> Recipe:
    """The recipe of the weight and what the adapter adds to it."""
    shape = tuple(place.weight.meta["val"].shape)
    product, is_turned = (module.outputs, module.inputs), _is_turned(place, module)
    if shape != (product[::-1] if is_turned else product):
        raise _another_model(
            adapter,
            f"{module.name} is of {module.inputs} inputs and {module.outputs} outputs, the weight {list(shape)}",
        )
    a, b = adapter.matrices(module)
    added: Recipe = Derived(aten.mm.default, (_constant(b), _constant(a)))
    if is_turned:
        added = Derived(aten.t.default, (added,))
    weight = graph.weights[place.weight.name]
    exact = Derived(aten.add.Tensor, (Derived(aten.to.dtype, (weight, torch.float32)), added))
    return Derived(aten.to.dtype, (exact, place.weight.meta["val"].dtype))


def _constant(matrix: object) -> Constant:
    value: Tensor = torch.as_tensor(matrix)
    return Constant(value)


def _is_turned(place: _Place, module: LoraModule) -> bool:
    """Whether the weight is stored as [inputs, outputs]: a table's, and GPT-2's Conv1D."""
    rows, columns = place.weight.meta["val"].shape
    if module.is_table or rows != columns:
        return (rows, columns) != (module.outputs, module.inputs)
    return any(user.target in WEIGHT_ON_THE_RIGHT and user.args[-1] is place.weight for user in place.readers)


def _find(graph: ModelGraph, module: str, adapter: Adapter, *, is_table: bool) -> _Place:
    """The weight that a module's readers read: lookups of a table, of any other module products."""
    places = [_Place(node, _readers(node, lookups=is_table)) for node in graph.weight_nodes()]
    places = [place for place in places if place.readers and place.weight.meta["val"].dim() == 2]
    fitting = [place for place in places if _is_of(graph.weights[place.weight.name], place.weight.name, module)]
    if not fitting and module in _HEADS:
        looked_up = {_stored(graph, node) for node in graph.weight_nodes() if _readers(node, lookups=True)}
        fitting = [place for place in places if _stored(graph, place.weight) in looked_up]
    if len(fitting) != 1:
        names = [tail(name.removesuffix(".weight")) for place in places for name in _stored(graph, place.weight)]
        raise _another_model(adapter, f"the model has no {'table' if is_table else 'linear layer'} {module!r}", names)
    return fitting[0]


def _readers(weight: fx.Node, *, lookups: bool) -> tuple[fx.Node, ...]:
    return tuple(user for user in weight.users if (user.target in _LOOKUPS) is lookups)


def _stored(graph: ModelGraph, weight: fx.Node) -> tuple[str, ...]:
    return stored_names(graph.weights[weight.name])[:1]


def _is_of(recipe: Recipe, placeholder: str, module: str) -> bool:
    if isinstance(recipe, Stored):
        return tail(recipe.name.removesuffix(".weight")) == module
    first = next(iter(stored_names(recipe)), None)
    own = first is not None and tail(first.removesuffix(".weight")) == module
    return own or f"_{placeholder}".endswith(f"_{identifier(module)}_weight")


def _another_model(adapter: Adapter, problem: str, names: Sequence[str] = ()) -> AdapterError:
    """names: the names of the model's own modules, for the error if the adapter names another one."""
    near = get_close_matches(problem.rpartition(" ")[2].strip("'"), names, n=1)
    more = f"; the nearest is {near[0]}" if near else ""
    return AdapterError(problem + more, at=adapter.file.path, fix="name an adapter that was trained on this model")


def _other_tokens(adapter: Adapter, tensor: str, trained: int, has: int) -> AdapterError:
    """The error for an adapter whose training added tokens to the model."""
    return AdapterError(
        f"the adapter was trained on a model with {trained} tokens ({tensor}), and this one has {has}",
        at=adapter.file.path,
        fix=f"merge them with peft: model.resize_token_embeddings({trained}), PeftModel.from_pretrained(model, "
        "DIRECTORY).merge_and_unload().save_pretrained(MERGED); then build MERGED with the adapter's tokenizer",
    )


def _replace(graph: ModelGraph, place: _Place, recipe: Recipe) -> None:
    """Give the readers a weight of this recipe: the same placeholder, or another one if others read it too."""
    if set(place.readers) == set(place.weight.users):
        graph.weights[place.weight.name] = recipe
        return
    with graph.graph.inserting_after(graph.graph.find_nodes(op="placeholder")[-1]):
        node = graph.graph.placeholder(f"adapted_{place.weight.name}")
    node.target = node.name
    node.meta.update(place.weight.meta)
    graph.weights[node.name] = recipe
    for reader in place.readers:
        reader.replace_input_with(place.weight, node)
