"""Which modules' rows a weight has, and in which order: read off its recipe, for a weight of numbers or of codes."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

import torch

from llmc.adapters.module_name import tail
from llmc.graph.model_graph import Adaptable
from llmc.graph.weights import Constant, Derived, Recipe, stored_names
from llmc.program.adapter_pools import AdaptedModule, RowRun

_aten, _llmc = torch.ops.aten, torch.ops.llmc
# What makes another form of each row of a weight by itself.
_STORED_BY_ROW = frozenset({_llmc.sparse_values.default, _llmc.sparse_masks.default})


def modules_of_rows(recipe: Recipe, known: Mapping[str, Adaptable]) -> tuple[AdaptedModule, ...] | str:
    """The modules in the order of the weight's rows, or why it cannot be said."""
    if isinstance(recipe, Derived) and recipe.target is _aten.cat.default and recipe.args[1:] in ((), (0,)):
        parts: tuple[AdaptedModule, ...] = ()
        for part in recipe.args[0]:
            found = modules_of_rows(part, known)
            if isinstance(found, str):
                return found
            start = parts[-1].end if parts else 0
            parts += tuple(replace(module, end=start + module.end) for module in found)
        return parts
    if isinstance(recipe, Derived) and recipe.target is _aten.index_select.default and recipe.args[1] == 0:
        source, _, order = recipe.args
        found = modules_of_rows(source, known)
        if isinstance(found, str) or len(found) != 1 or not isinstance(order, Constant):
            return found if isinstance(found, str) else "rows of several modules are mixed"
        rows = [row for run in found[0].rows for row in range(run.first, run.first + run.count)]
        return (replace(found[0], end=len(order.value), rows=_runs([rows[int(i)] for i in order.value])),)
    if isinstance(recipe, Derived) and recipe.target in _STORED_BY_ROW:
        return modules_of_rows(recipe.args[0], known)
    return _of_one(recipe, known)


def _of_one(recipe: Recipe, known: Mapping[str, Adaptable]) -> tuple[AdaptedModule, ...] | str:
    names = dict.fromkeys(tail(name.removesuffix(".weight")) for name in stored_names(recipe))
    if len(names) != 1:
        return f"its weight is made of {len(names)} of the checkpoint's tensors, in a way that is not known"
    (name,) = names
    layer = known.get(name)
    if layer is None:
        return f"{name} is no linear layer of the model"
    return (AdaptedModule(name, layer.inputs, layer.outputs, layer.outputs, (RowRun(0, layer.outputs),)),)


def _runs(rows: list[int]) -> tuple[RowRun, ...]:
    """Rows as runs of such that follow each other."""
    grouped = groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0])
    return tuple(RowRun(run[0][1], len(run)) for _, each in grouped if (run := list(each)))
