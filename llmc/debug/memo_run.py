"""Run many versions of one graph on the same tokens, and compute only what differs from the version before.

A call with the same op and argument values as in the last run is not repeated. Values are compared by content, so a
rewrite that preserves the bits costs only its own nodes. Weights, and values computed only from weights, are loaded
for each call and dropped after it: memory holds one of them, and the activations of one run.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from llmc.errors import PassError
from llmc.graph.dead_code import writes_memory
from llmc.graph.execute import sequence_inputs, uncut_sizes
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import record_of
from llmc.graph.ranks import OnRanks, call, copied, first_rank, weight_value
from llmc.graph.render import op_name
from llmc.graph.source_line import source_line
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant, Derived, PerRank, Recipe, Stored, WeightSource

aten = torch.ops.aten


@dataclass(frozen=True)
class Value:
    """The value of a node. key: equal for equal contents. get: returns the tensor, number or tuple."""

    key: str
    get: Callable[[], Any]


@dataclass(frozen=True)
class StepValues:
    """One step: what its inputs and caches were before it, and what every node stood for after it, by name."""

    inputs: dict[str, Value]
    nodes: dict[str, Value]


@dataclass(frozen=True)
class _Call:
    """The outcome of a call: its result, and the new contents of the arguments that it writes, by index."""

    result: Value
    written: dict[int, Value]


class MemoRun:
    """Runs graphs of one model on one sequence of tokens.

    chunk_sizes: how many tokens each step takes once every attention is paged, so that later steps read what earlier
    ones put into the cache. block_size: positions in a cache block, as the graphs were made for.
    """

    def __init__(
        self, source: WeightSource, tokens: Sequence[int], *, chunk_sizes: Sequence[int], block_size: int
    ) -> None:
        if sum(chunk_sizes) != len(tokens) or not tokens:
            raise ValueError(f"{len(tokens)} tokens cannot be run in chunks of {list(chunk_sizes)}")
        self.tokens = tuple(tokens)
        self._source = source
        self._chunk_sizes = tuple(chunk_sizes)
        self.block_size = block_size
        self._memo: dict[str, _Call] = {}
        self._recipe_keys: dict[int, tuple[Recipe, str]] = {}
        self._known_recipes: dict[int, tuple[Recipe, str]] = {}
        self._logits: tuple[str, Tensor] | None = None

    def logits(self, graph: ModelGraph) -> Tensor:
        """Logits [tokens, vocabulary], fp32, after each token. Raises PassError where a node does not run."""
        values = [step.nodes[graph.logits().name] for step in self.steps(graph)]
        key = "".join(value.key for value in values)
        if self._logits is None or self._logits[0] != key:
            rows = [first_rank(value.get()) for value in values]
            self._logits = (key, torch.cat([(r if r.dim() == 2 else r[0]).float() for r in rows]))
        return self._logits[1]

    def chunks(self, graph: ModelGraph) -> tuple[int, ...]:
        """Return the number of tokens of each step. All tokens are in one step if some attention is not paged yet or
        some state is not kept, because these see only their own step."""
        records = (record_of(node) for node in graph.graph.nodes)
        is_whole = any(
            record is not None and record.stages and Stage.OPTIMIZED not in record.stages for record in records
        )
        return (len(self.tokens),) if is_whole else uncut_sizes(graph, self._chunk_sizes)

    def steps(self, graph: ModelGraph) -> list[StepValues]:
        """The values of all nodes in each step. Raises PassError if a node fails to run."""
        steps = sequence_inputs(graph, self.tokens, chunk_sizes=self.chunks(graph), block_size=self.block_size)
        kept: dict[str, _Call] = {}
        of_steps: list[StepValues] = []
        carried: dict[str, Value] = {}
        caches = {n.name for n in graph.inputs() if n.name.startswith(("kv_cache_", "state_"))}
        try:
            for inputs in steps:
                before = {name: value_of(tensor) for name, tensor in inputs.items() if name not in carried} | carried
                after = self._run(graph, before, kept)
                carried = {name: after[name] for name in caches}
                of_steps.append(StepValues(before, after))
        finally:
            self._memo = kept
            # Entries of an older graph may hold tensors that are no longer needed.
            self._known_recipes, self._recipe_keys = self._recipe_keys, {}
        return of_steps

    def _run(self, graph: ModelGraph, inputs: dict[str, Value], kept: dict[str, _Call]) -> dict[str, Value]:
        values: dict[fx.Node, Value] = {}
        constant: set[fx.Node] = set()
        with torch.inference_mode():
            for node in graph.graph.nodes:
                if node.op == "placeholder":
                    recipe = graph.weights.get(node.name)
                    values[node] = inputs[node.name] if recipe is None else self._weight(recipe, graph.ranks)
                    constant |= set() if recipe is None else {node}
                elif node.op == "call_function" and node.all_input_nodes and constant.issuperset(node.all_input_nodes):
                    operands = {operand: values[operand] for operand in node.all_input_nodes}
                    values[node] = Value(call_key(node, values), partial(_compute_constant, node, operands))
                    constant.add(node)
                elif node.op == "call_function":
                    key = call_key(node, values)
                    call = kept.get(key) or self._memo.get(key) or _make(node, values)
                    kept[key] = call
                    values[node] = call.result
                    for index, value in call.written.items():
                        values[node.args[index]] = value
        return {node.name: value for node, value in values.items()}

    def recipe_key(self, recipe: Recipe) -> str:
        """Return a key that is equal for recipes that give equal weights."""
        known = self._recipe_keys.get(id(recipe)) or self._known_recipes.get(id(recipe))
        # The recipe is kept, so that its id stays its own.
        known = self._recipe_keys[id(recipe)] = known or (recipe, _key(recipe))
        return known[1]

    def _weight(self, recipe: Recipe, ranks: int) -> Value:
        return Value(self.recipe_key(recipe), lambda: weight_value(recipe, self._source, ranks))


def default_chunks(count: int) -> tuple[int, ...]:
    """A prompt, and a shorter second step that reads what the first one cached."""
    return (count,) if count < 4 else (count - count // 4, count // 4)


def value_of(content: Any) -> Value:
    """Wrap a value with a key: equal contents have equal keys."""
    return Value(_key(content), lambda: content)


def call_key(node: fx.Node, values: dict[fx.Node, Value]) -> str:
    """Return a key that is equal for calls of the same op on equal values."""

    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return values[argument].key
        if isinstance(argument, list | tuple):
            return f"[{','.join(text(a) for a in argument)}]"
        if isinstance(argument, dict):
            return f"{{{','.join(f'{k}={text(v)}' for k, v in sorted(argument.items()))}}}"
        return repr(argument)

    return f"{node.target}({text(node.args)}{text(dict(node.kwargs))})"


def _make(node: fx.Node, values: dict[fx.Node, Value]) -> _Call:
    arguments: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n].get())
    written = written_arguments(node)
    args = tuple(copied(a) if i in written else a for i, a in enumerate(arguments[0]))
    return _Call(value_of(_call(node, args, arguments[1])), {i: value_of(args[i]) for i in written})


def _compute_constant(node: fx.Node, operands: dict[fx.Node, Value]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: operands[n].get())
    return _call(node, args, kwargs)


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run a call. Raises PassError if the op does not run."""
    # Equal values may lie in memory in another order than a view was traced with.
    target: Any = aten.reshape.default if node.target is aten.view.default else node.target
    try:
        return call(target, args, kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise PassError(
            f"node {node.name} ({op_name(node.target)}) does not run: {error}",
            at=source_line(node) or node.format_node(),
            fix="find the rewrite that made it so: llmc bisect MODEL",
        ) from error


def written_arguments(node: fx.Node) -> tuple[int, ...]:
    """The indices of the arguments whose memory a call writes."""
    if not writes_memory(node) or not isinstance(node.target, OpOverload):
        return ()
    arguments = node.target._schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _key(value: Any) -> str:
    """Return a key that is equal for equal contents, and for recipes that give equal weights."""
    match value:
        case Tensor():
            flat = value.detach().contiguous().reshape(-1)
            digest = hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).hexdigest()
            return f"{value.dtype}{list(value.shape)}{digest}"
        case OnRanks():
            return f"ranks {_key(value.values)}"
        case Stored():
            return f"stored {value.name} {value.dtype}"
        case Constant():
            return _key(value.value)
        case PerRank():
            return f"ranks {_key(value.recipes)}"
        case Derived():
            return f"{value.target}{_key(value.args)}{_key(value.kwargs)}"
        case tuple() | list():
            return f"[{','.join(map(_key, value))}]"
    return repr(value)
