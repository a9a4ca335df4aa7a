"""From an exported program to a ModelGraph: weights become named placeholders, after input_ids and positions."""

import operator
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import SymInt, Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from llmc.errors import CaptureError
from llmc.frontends.tracing.trace_errors import OTHER_MODELS
from llmc.graph.model_graph import ModelGraph, ModelInfo
from llmc.graph.source_line import source_line
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant, Recipe, Stored, identifier
from llmc.program import HIDDEN

_INPUTS = ("input_ids", "positions", HIDDEN)
# Frames of these packages in a node's stack trace say nothing about the model.
_NOT_THE_MODEL = (f'File "{Path(torch.__file__).parent}/', f'File "{Path(__file__).parents[2]}/')


def graph_from_program(
    program: ExportedProgram,
    recipes: Mapping[str, Recipe],
    info: ModelInfo,
    prefix: str = "",
    side_outputs: Sequence[str] = (),
) -> ModelGraph:
    """The graph of a functional program with the user inputs input_ids [1, T], perhaps positions [1, T], and perhaps a
    hidden state [1, T, width].

    recipes: the recipes of parameters and buffers by their name in the program less `prefix`; a missing one becomes a
    constant of its value. Placeholders of one Stored recipe (tied weights) become one. vocab_size and, for models with
    learned positions, max_positions of `info` are filled in from the graph. side_outputs: what the results after the
    logits are called.
    """
    specs = input_specs(program)
    _refuse_mutation(program)
    graph = fx.Graph()
    users = [node for node, spec in specs.items() if spec.kind is InputKind.USER_INPUT]
    mapping = _inputs(graph, users)
    tokens = _token_count(mapping[users[0]])

    weights: dict[str, Recipe] = {}
    tied: dict[Stored, fx.Node] = {}
    for node, spec in specs.items():
        if node in mapping or not node.users:
            continue
        target = _target(spec)
        recipe = recipes.get(target.removeprefix(prefix)) or _constant(program, target)
        if isinstance(recipe, Stored) and recipe in tied:
            mapping[node] = tied[recipe]
            continue
        name = recipe.name if isinstance(recipe, Stored) else target.removeprefix(prefix)
        mapping[node] = _placeholder(graph, identifier(name), node)
        weights[mapping[node].name] = recipe
        if isinstance(recipe, Stored):
            tied[recipe] = mapping[node]

    for node in program.graph.nodes:
        if node.op == "output":
            graph.output(mapping[_logits(node, tokens)])
        elif node.op != "placeholder":
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = _kept(node)
    (logits,) = graph.output_node().all_input_nodes
    limits = [n for n in (info.max_positions, position_limit(graph, weights), _upper_bound(tokens)) if n is not None]
    width, longest = logits.meta["val"].shape[-1], min(limits, default=None)
    if info.head is None:
        info = replace(info, vocab_size=width, max_positions=longest)
    else:
        head = replace(info.head, width=width, whole_texts=reads_whole_texts(graph))
        info = replace(info, head=head, max_positions=longest)
    _refuse_sizes_of_values(logits)
    result = ModelGraph(graph, Stage.CAPTURED, weights, info)
    (returned,) = program.graph.output_node().args
    for name, node in zip(side_outputs, returned[1:] if side_outputs else (), strict=True):
        result.add_side_output(name, mapping[node])
    return result


def reads_whole_texts(graph: fx.Graph) -> bool:
    """Whether what it gives for a text depends on tokens in ways that no KV cache holds."""
    ops = torch.ops.llmc
    whole = (ops.pool.default, ops.bidirectional_attention.default, ops.segments.default)
    return any(node.target in whole for node in graph.nodes)


def input_specs(program: ExportedProgram) -> dict[fx.Node, InputSpec]:
    """The specification of each placeholder of the program."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    return {node: specs[node.name] for node in program.graph.find_nodes(op="placeholder")}


def _inputs(graph: fx.Graph, users: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Placeholders for the program's own inputs, and for positions if it takes none."""
    inputs = {user: _placeholder(graph, name, user) for user, name in zip(users, _INPUTS, strict=False)}
    if len(users) == 1:
        ids = inputs[users[0]].meta["val"]
        positions = _placeholder(graph, "positions", users[0])
        with ids.fake_mode:
            positions.meta = {"val": torch.empty_like(ids, dtype=torch.int64)}
    return inputs


def _placeholder(graph: fx.Graph, name: str, source: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    # Node and target agree even where the graph had to make the name unique.
    node.target = node.name
    node.meta = _kept(source)
    return node


def _kept(node: fx.Node) -> dict[str, object]:
    kept: dict[str, object] = {"val": node.meta.get("val")}
    if node.meta.get("stack_trace"):
        kept["stack_trace"] = _model_frames(node.meta["stack_trace"])
    return kept


def _model_frames(stack_trace: str) -> str:
    """Drop frames of torch.nn and of this package (wrapper, hooks), so that the last frame is the model's own line."""
    frames = re.split(r'^ *(?=File ")', stack_trace, flags=re.MULTILINE)
    return "".join(frame for frame in frames if not frame.startswith(_NOT_THE_MODEL))


def _token_count(ids: fx.Node) -> SymInt:
    size = ids.meta["val"].shape[1]
    if not isinstance(size, SymInt) or size.node.expr.is_number:
        raise CaptureError(
            f"the number of tokens is fixed to {size}",
            fix="export with dynamic_shapes={'ids': {1: torch.export.Dim.DYNAMIC}}",
        )
    return size


def _upper_bound(tokens: SymInt) -> int | None:
    """The longest input that the model's own checks allow."""
    upper = tokens.node.shape_env.bound_sympy(tokens.node.expr).upper
    return int(upper) if upper.is_Integer and upper < 2**31 else None


def _refuse_mutation(program: ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(
                f"forward changes {spec.target or spec.arg.name}, a buffer or input of the model",
                fix="keep no state between calls: an engine has its own KV cache",
            )


def _refuse_sizes_of_values(logits: fx.Node) -> None:
    """Raise CaptureError for the first tensor before the logits whose size no shape of the step says."""
    seen, left = {logits}, [logits]
    while left:
        fresh = [operand for operand in left.pop().all_input_nodes if operand not in seen]
        seen.update(fresh)
        left += fresh
    for node in logits.graph.nodes:
        value = node.meta.get("val")
        if node in seen and isinstance(value, Tensor) and free_unbacked_symbols(value):
            made_by = node.args[0] if node.target is operator.getitem else node
            assert isinstance(made_by, fx.Node)
            raise CaptureError(
                f"{made_by.target} makes a tensor {list(map(str, value.shape))} whose size depends on tensor values, "
                "which a compiled graph cannot follow",
                at=source_line(node),
                fix=OTHER_MODELS,
            )


def _target(spec: InputSpec) -> str:
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    if spec.target is None or spec.kind not in kinds:
        raise CaptureError(f"the program has an input of kind {spec.kind.name}, which is not a tensor: {spec.arg.name}")
    return spec.target


def _constant(program: ExportedProgram, target: str) -> Constant:
    value = program.constants[target] if target in program.constants else program.state_dict[target]
    return Constant(value.detach())


def _logits(output: fx.Node, tokens: SymInt) -> fx.Node:
    (results,) = output.args
    if not isinstance(results, tuple | list) or not results or not isinstance(results[0], fx.Node):
        raise CaptureError(f"the model returns {results}, not logits", fix="return logits [1, tokens, vocab]")
    value = results[0].meta["val"]
    shape = list(value.shape)
    if value.dim() != 3 or not value.is_floating_point():
        raise CaptureError(
            f"the model returns a tensor of shape {shape} and {value.dtype}, which cannot be logits",
            fix="return logits [1, tokens, vocab]",
        )
    if not isinstance(shape[1], SymInt) or shape[1].node.expr != tokens.node.expr:
        raise CaptureError(
            f"the model returns logits of {shape[1]} position(s), not of every token",
            at=_last_line(results[0]),
            fix="return logits for all tokens at inference; nanoGPT's forward, for example, must apply lm_head to x "
            "and not to x[:, [-1], :] if there are no targets",
        )
    return results[0]


def _last_line(node: fx.Node) -> str | None:
    frames = re.findall(r'File "([^"]+)", line (\d+)', _model_frames(node.meta.get("stack_trace") or ""))
    return ":".join(frames[-1]) if frames else None


_ARANGE = (torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step)


def position_limit(graph: fx.Graph, weights: Container[str]) -> int | None:
    """The fewest rows of a position table, or None if the model has none.

    A table is a weight that is embedded at indices which depend on arange or `positions` and on nothing else.
    """
    lookups = graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    read = [node.args[:2] for node in lookups]
    tables = [table for table, index in read if table.name in weights and _only_positions(index)]
    return min((table.meta["val"].shape[0] for table in tables), default=None)


def _only_positions(index: fx.Node) -> bool:
    sources: set[bool] = set()
    pending, seen = [index], {index}
    while pending:
        node = pending.pop()
        if node.op == "placeholder" or node.target in _ARANGE:
            sources.add(node.op != "placeholder" or node.name == "positions")
            continue
        # Sizes such as sym_size of input_ids say how many positions there are, not which.
        inputs = [n for n in node.all_input_nodes if not isinstance(n.meta["val"], SymInt | int)]
        pending.extend(n for n in inputs if n not in seen)
        seen.update(inputs)
    return sources == {True}
