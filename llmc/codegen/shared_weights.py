"""Weights that a drafter's engine does not store, because its enclosing engine has the same ones."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from llmc.codegen.stage_builds import StageBuild
from llmc.codegen.weight_slots import CodesRecipe, SlotRecipe, recipe_key
from llmc.graph.draft_records import PREFIX
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Constant, Recipe, Stored, WeightSource, evaluate, stored_names
from llmc.program import WeightSlot


def shared_slots(outer: Sequence[StageBuild], inner: Sequence[StageBuild]) -> dict[str, str]:
    """The names in the outer engine of the inner one's weights that are the same, by their own: made of the same, in
    the same layout. None between engines of several ranks or stages."""
    if len(outer) > 1 or len(inner) > 1 or any(build.program.ranks > 1 for build in (*outer, *inner)):
        return {}
    held: dict[Hashable, list[tuple[WeightSlot, SlotRecipe]]] = {}
    for slot, recipe in zip(outer[0].program.weights, outer[0].recipes, strict=True):
        if _tensors(recipe):
            held.setdefault(_about(slot, recipe), []).append((slot, recipe))
    return {
        slot.name: theirs.name
        for slot, recipe in zip(inner[0].program.weights, inner[0].recipes, strict=True)
        for theirs, held_recipe in held.get(_about(slot, recipe), ())[:1]
        if _is_same(recipe, held_recipe)
    }


def _about(slot: WeightSlot, recipe: SlotRecipe) -> Hashable:
    """The key that equal stored weights share."""
    return replace(slot, name=""), _tensors(recipe)


def _tensors(recipe: SlotRecipe) -> tuple[str, ...]:
    """The tensors of the checkpoint that it is made of."""
    return stored_names(recipe.parts["codes"] if isinstance(recipe, CodesRecipe) else recipe)


def _is_same(one: SlotRecipe | None, other: SlotRecipe | None) -> bool:
    """Codes that a pass has made of a weight are compared with those that it made for the other engine."""
    if isinstance(one, CodesRecipe) and isinstance(other, CodesRecipe):
        is_alike = one.format == other.format and one.parts.keys() == other.parts.keys()
        return is_alike and all(_is_same(part, other.parts[name]) for name, part in one.parts.items())
    if isinstance(one, Constant) and isinstance(other, Constant):
        return one.value.dtype == other.value.dtype and torch.equal(one.value, other.value)
    return recipe_key(one) == recipe_key(other)


def with_shared_tables(draft: ModelGraph, target: ModelGraph, source: WeightSource) -> ModelGraph:
    """The captured graph of a draft with the target's recipes of its embeddings and of its output matrix where its
    checkpoint holds copies of them. target: as it was captured."""
    tables = _tables(target, target.info.vocab_size)
    shared: dict[str, Recipe] = {}
    for name, (shape, recipe) in _tables(draft, target.info.vocab_size).items():
        if recipe.name.startswith(PREFIX):
            own = evaluate(recipe, source)
            for their_shape, theirs in tables.values():
                if shape == their_shape and theirs.dtype == recipe.dtype and torch.equal(own, evaluate(theirs, source)):
                    shared[name] = theirs
    return replace(draft, weights=draft.weights | shared)


def _tables(graph: ModelGraph, rows: int) -> dict[str, tuple[tuple[int, ...], Stored]]:
    """The matrices with a row for each token that a checkpoint holds as they are, with their shapes, by name."""
    weights = {node.name: tuple(node.meta["val"].shape) for node in graph.weight_nodes()}
    return {
        name: (shape, recipe)
        for name, shape in weights.items()
        if isinstance(recipe := graph.weights[name], Stored) and len(shape) == 2 and shape[0] == rows
    }
