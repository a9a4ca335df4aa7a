"""The modules that draft, and recipes for their parameters from a checkpoint's tensors, whatever its layout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.frontends.tracing.fake_copy import make_parameters_fake
from llmc.frontends.tracing.program_graph import graph_from_program
from llmc.frontends.tracing.trace import trace
from llmc.graph.draft_records import PREFIX
from llmc.graph.model_graph import AttachedDraft, ModelInfo
from llmc.graph.weights import Recipe, Stored
from llmc.program import HIDDEN


@dataclass(frozen=True)
class DraftModule:
    """A draft as a module to capture. module: forward(input_ids, positions, hidden) -> (logits, hidden), with fake
    parameters. recipes: the recipes of its parameters. id_offsets: the name of the tensor that holds, for each of the
    draft's ids, the offset to the target's id; None if both have the same ids."""

    module: nn.Module
    recipes: Mapping[str, Recipe]
    width: int
    vocab_size: int
    id_offsets: str | None


class DraftTensors:
    """A draft checkpoint's tensors by the names of its layout. fix: the advice in errors about tensors that do not
    fit."""

    def __init__(self, source: SafetensorsSource, target: str) -> None:
        self._source, self._target = source, target
        self._names = frozenset(source.names())

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises CheckpointError if the checkpoint lacks it."""
        if name not in self._names:
            names = sorted(self._names)
            listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise CheckpointError(
                f"the draft's checkpoint has no tensor {name!r}, but {listed}",
                at=self._source.directory,
                fix="download the whole checkpoint again, or check that config.json belongs to it",
            )
        return self._source.shape(name)

    def recipe(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Recipe:
        """The recipe of a tensor with this shape. Raises CheckpointError."""
        actual = self.shape(name)
        if actual != shape:
            raise CheckpointError(
                f"tensor {name!r} is {list(actual)}, where a draft for {self._target} needs {list(shape)}",
                at=self._source.entry(name).file,
                fix="take the draft that was trained for this model",
            )
        self._source.check(name, shape, floating=dtype.is_floating_point)
        return Stored(PREFIX + name, dtype)


def parameter_recipes(
    module: nn.Module, tensors: DraftTensors, stored: Mapping[str, str], known: Mapping[str, Recipe]
) -> dict[str, Recipe]:
    """The recipes of all parameters of a drafter's module. stored: the checkpoint's name for each prefix of parameter
    names; the longest matching prefix counts. known: recipes that already exist, such as those of the target's
    tensors."""
    recipes = dict(known)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in known:
            continue
        prefix = max((stem for stem in stored if name.startswith(stem)), key=len)
        recipes[name] = tensors.recipe(
            stored[prefix] + name.removeprefix(prefix), tuple(parameter.shape), parameter.dtype
        )
    return recipes


def attached_draft(draft: DraftModule, method: str, info: ModelInfo) -> AttachedDraft:
    """A graph at stage captured, with the hidden state of each token as an input, fp32, and as a side output.

    method: what the drafter is called, which is the model's family too. info: the info of the target. Raises
    CaptureError.
    """
    make_parameters_fake(draft.module)
    program = trace(draft.module, with_positions=True, hidden=draft.width)
    own = replace(info, name=f"{info.name}-{method}", family=method, vocab_size=0, max_positions=None)
    graph = graph_from_program(program, draft.recipes, own, side_outputs=(HIDDEN,))
    offsets = None if draft.id_offsets is None else Stored(draft.id_offsets, torch.int64)
    return AttachedDraft(graph, method, offsets)
