"""Recipes of codes for a weight that is made of stored ones: experts in one matrix, one below the other.

Rows of codes are independent, so recipes that join rows also join codes and scales. For a tensor [experts, in, out] of
the model, codes are already stored in rows.
"""

from typing import Any

import torch

from llmc.graph.weights import Derived, Recipe, Stored

_aten = torch.ops.aten


def rows_of(recipe: Recipe, part: str, dtype: torch.dtype) -> Recipe | None:
    """The recipe that takes the same rows from a part of each stored matrix. part: `codes` or `scales`.

    None if the recipe does more than join rows.
    """
    whole = transposed_experts(recipe)
    if whole is not None:
        return Stored(f"{whole.name}::{part}", dtype)
    result = _rows_of(recipe, part, dtype)
    return result[0] if result is not None and result[1] == 2 else None


def transposed_experts(recipe: Recipe) -> Stored | None:
    """The stored [experts, in, out] that a recipe turns into [experts · out, in], or None if it does something else."""
    if not isinstance(recipe, Derived) or recipe.kwargs or recipe.target is not _aten.reshape.default:
        return None
    inner, shape = recipe.args
    is_transposed = isinstance(inner, Derived) and inner.target is _aten.transpose.int and len(shape) == 2
    if not is_transposed or {axis % 3 for axis in inner.args[1:]} != {1, 2}:
        return None
    return inner.args[0] if isinstance(inner.args[0], Stored) else None


def _rows_of(recipe: Any, part: str, dtype: torch.dtype) -> tuple[Recipe, int] | None:
    """The recipe with its number of axes; the last axis is the columns."""
    if isinstance(recipe, Stored):
        return Stored(f"{recipe.name}::{part}", dtype), 2
    if not isinstance(recipe, Derived) or recipe.kwargs:
        return None
    if recipe.target is _aten.reshape.default:
        inner = _rows_of(recipe.args[0], part, dtype)
        rows, *columns = recipe.args[1]
        # Scales have fewer columns.
        return None if inner is None or len(columns) != 1 else (Derived(recipe.target, (inner[0], (rows, -1))), 2)
    if recipe.target not in (_aten.stack.default, _aten.cat.default):
        return None
    parts = [_rows_of(operand, part, dtype) for operand in recipe.args[0]]
    known = [operand for operand in parts if operand is not None]
    if len(known) != len(parts):
        return None
    axes = known[0][1] + (recipe.target is _aten.stack.default)
    axis = recipe.args[1] if len(recipe.args) > 1 else 0
    if axis % axes == axes - 1:
        return None
    return Derived(recipe.target, (tuple(operand for operand, _ in known), axis)), axes
