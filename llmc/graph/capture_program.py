"""From an exported program to a ModelGraph: weights become named placeholders, after input_ids and positions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from llmc.errors import CaptureError
from llmc.graph.model_graph import ModelGraph, ModelInfo
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant, Recipe, Stored

_PACKAGE = str(Path(__file__).parents[1])
INPUTS = ("input_ids", "positions")


def graph_from_program(
    program: ExportedProgram, recipe_of: Callable[[str], Recipe | None], info: ModelInfo, prefix: str = ""
) -> ModelGraph:
    """The graph of a functional program whose user inputs are input_ids and positions, both [1, T].

    recipe_of: the recipe of a parameter or buffer by its name in the program; None makes a constant of its value.
    prefix: what a wrapper module put before those names.
    Placeholders of one Stored recipe (tied weights) become one.
    """
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    placeholders = program.graph.find_nodes(op="placeholder")
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    users = [node for node in placeholders if specs[node.name].kind is InputKind.USER_INPUT]
    for name, node in zip(INPUTS, users, strict=True):
        mapping[node] = _placeholder(graph, name, node)

    weights: dict[str, Recipe] = {}
    tied: dict[Stored, fx.Node] = {}
    for node in placeholders:
        if node in mapping or not node.users:
            continue
        spec = specs[node.name]
        recipe = _recipe(program, spec, prefix, recipe_of)
        if isinstance(recipe, Stored) and recipe in tied:
            mapping[node] = tied[recipe]
            continue
        name = recipe.name if isinstance(recipe, Stored) else (spec.target or node.name).removeprefix(prefix)
        mapping[node] = _placeholder(graph, identifier(name), node)
        weights[mapping[node].name] = recipe
        if isinstance(recipe, Stored):
            tied[recipe] = mapping[node]

    for node in program.graph.nodes:
        if node.op == "output":
            graph.output(mapping[_logits(node)])
        elif node.op != "placeholder":
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = _kept(node)
    return ModelGraph(graph, Stage.CAPTURED, weights, info)


def identifier(name: str) -> str:
    """A placeholder's name from a checkpoint name: "model.layers.0.mlp" becomes "model_layers_0_mlp"."""
    cleaned = re.sub(r"\W", "_", name)
    return f"_{cleaned}" if cleaned[:1].isdigit() else cleaned


def _placeholder(graph: fx.Graph, name: str, source: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    # Node and target agree even where the graph had to make the name unique.
    node.target = node.name
    node.meta = _kept(source)
    return node


def _kept(node: fx.Node) -> dict[str, object]:
    kept: dict[str, object] = {"val": node.meta.get("val")}
    if node.meta.get("stack_trace"):
        kept["stack_trace"] = _without_own_frames(node.meta["stack_trace"])
    return kept


def _without_own_frames(stack_trace: str) -> str:
    """Drop this package's frames (wrapper and hooks), so that the last frame is the model's own line."""
    frames = re.split(r"^ *(?=File \")", stack_trace, flags=re.MULTILINE)
    return "".join(frame for frame in frames if f'File "{_PACKAGE}' not in frame)


def _recipe(
    program: ExportedProgram, spec: InputSpec, prefix: str, recipe_of: Callable[[str], Recipe | None]
) -> Recipe:
    target = spec.target
    if target is None or spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
        raise CaptureError(f"the program has an input of kind {spec.kind.name}, which is not a tensor: {spec.arg.name}")
    recipe = recipe_of(target.removeprefix(prefix))
    if recipe is not None:
        return recipe
    value = program.constants[target] if target in program.constants else program.state_dict[target]
    return Constant(value.detach())


def _logits(output: fx.Node) -> fx.Node:
    (results,) = output.args
    if not isinstance(results, tuple | list) or len(results) != 1 or not isinstance(results[0], fx.Node):
        raise CaptureError(f"the program returns {results}, not one tensor of logits")
    return results[0]
