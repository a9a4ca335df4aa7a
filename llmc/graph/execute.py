"""Run a graph of any stage eagerly: every llmc:: op has a reference, so every graph in the pipeline runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from llmc.errors import RequestError
from llmc.graph.interpreter import GraphInterpreter
from llmc.graph.model_graph import ModelGraph
from llmc.graph.ranks import OnRanks, weight_value
from llmc.graph.step_inputs import group_inputs, step_input
from llmc.graph.weights import WeightSource
from llmc.program import ADAPTERS, COMPACTION, HIDDEN, ROW_ADAPTERS, STATE_SLOTS, CachePolicy, group_input
from llmc.program.slot_views import cache_views, move_slots


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in one step. start: the position of the first; earlier ones are in the cache."""

    sequence: int
    start: int
    tokens: tuple[int, ...]


def run_tokens(
    graph: ModelGraph,
    source: WeightSource,
    token_ids: Sequence[int],
    *,
    chunk_sizes: Sequence[int] | None = None,
    block_size: int = 16,
) -> Tensor:
    """Logits [tokens, vocabulary], fp32, after each token of one sequence.

    chunk_sizes: how many tokens each step takes (serving and later); None takes all in one step.
    """
    tokens = tuple(token_ids)
    sizes = (len(tokens),) if chunk_sizes is None else tuple(chunk_sizes)
    if not tokens or sum(sizes) != len(tokens):
        raise RequestError(f"{len(tokens)} tokens cannot be run in chunks of {list(sizes)}")
    steps = _steps(tokens, uncut_sizes(graph, sizes))
    return torch.cat([rows for step in run_steps(graph, source, steps, block_size=block_size) for rows in step])


def run_steps(
    graph: ModelGraph, source: WeightSource, steps: Sequence[Sequence[Chunk]], *, block_size: int = 16
) -> list[list[Tensor]]:
    """Logits [chunk's tokens, vocabulary] of each chunk of each step, fp32.

    Stages before serving have no cache: there each chunk must be a whole sequence, and runs by itself. No chunk may
    extend past a cut of a table (`uncut_sizes`).
    """
    weights = {n.name: weight_value(graph.weights[n.name], source, graph.ranks) for n in graph.weight_nodes()}
    if step_input(graph, "slot_mapping") is None:
        return [[_run_whole(graph, weights, chunk) for chunk in step] for step in steps]
    caches = _Caches(graph, steps, block_size)
    return [_run_step(graph, weights | caches.tensors, caches, step) for step in steps]


def sequence_inputs(
    graph: ModelGraph, token_ids: Sequence[int], *, chunk_sizes: Sequence[int], block_size: int
) -> list[dict[str, Any]]:
    """The values of all step inputs by node name, one dictionary per step of the chunks.

    A graph before serving has one step with all tokens. The caches, all zero, are the same tensors in each step. No
    chunk may extend past a cut of a table (uncut_sizes).
    """
    tokens = tuple(token_ids)
    if step_input(graph, "slot_mapping") is None:
        return [_whole_inputs(graph, tokens)]
    steps = _steps(tokens, chunk_sizes)
    for policy in graph.policies:
        if any(cut.sources for _, cut in policy.cuts_before(len(tokens), len(tokens))):
            raise RequestError(
                f"{policy.shown} moves rows of the cache between steps, which is not done where values of nodes "
                "are read",
                fix="compare earlier passes: --passes ..compress_kv_cache; or read at most "
                f"{next(policy.cuts(len(tokens)))} tokens: no row is dropped before",
            )
    caches = _Caches(graph, steps, block_size)
    return [caches.tensors | _step_inputs(graph, caches, step) for step in steps]


def uncut_sizes(graph: ModelGraph, chunk_sizes: Sequence[int]) -> tuple[int, ...]:
    """The chunk sizes, split where a cache policy of the graph cuts tables."""
    cuts = (end for policy in graph.policies for end in policy.cuts(sum(chunk_sizes)))
    return tuple(end - start for start, end in pairwise(sorted({0, *accumulate(chunk_sizes), *cuts})))


def _steps(tokens: tuple[int, ...], chunk_sizes: Sequence[int]) -> list[list[Chunk]]:
    """The steps of one sequence."""
    ends = pairwise(accumulate(chunk_sizes, initial=0))
    return [[Chunk(0, start, tokens[start:end])] for start, end in ends]


def interpret(graph: ModelGraph, inputs: Mapping[str, Tensor | OnRanks]) -> Tensor:
    """The graph's logits, given every placeholder by node name."""
    return GraphInterpreter(graph.graph).outputs(inputs)[0]


def _run_whole(graph: ModelGraph, weights: dict[str, Any], chunk: Chunk) -> Tensor:
    if chunk.start != 0:
        raise RequestError(f"a {graph.stage.value} graph has no cache, so it cannot start at position {chunk.start}")
    logits = interpret(graph, weights | _whole_inputs(graph, chunk.tokens))
    return (logits if logits.dim() == 2 else logits[0]).float()


def _whole_inputs(graph: ModelGraph, tokens: tuple[int, ...]) -> dict[str, Any]:
    ids = torch.tensor(tokens)
    values = {"input_ids": ids, "positions": torch.arange(len(ids))}
    ranks = {n.name: n.meta["val"].dim() for n in graph.inputs()}
    whole = {name: v if ranks[name] == 1 else v[None] for name, v in values.items()}
    hidden = _hidden(graph, values["positions"])
    return whole | {name: v if ranks[name] == 2 else v[None] for name, v in hidden.items()}


def _hidden(graph: ModelGraph, positions: Tensor) -> dict[str, Tensor]:
    """Placeholder hidden states for a graph that reads them. They depend on positions only, not on chunks."""
    node = step_input(graph, HIDDEN)
    if node is None:
        return {}
    columns = torch.arange(1, 1 + node.meta["val"].shape[-1], dtype=torch.float64)
    return {HIDDEN: torch.sin((positions[:, None] + 1.0) * columns).float()}


class _Caches:
    """Cache tensors for the sequences of some steps; sequence s owns a run of blocks, in order, and slot s of states.

    States start with values that no sequence may read.
    """

    def __init__(self, graph: ModelGraph, steps: Sequence[Sequence[Chunk]], block_size: int) -> None:
        chunks = [chunk for step in steps for chunk in step]
        longest = max(chunk.start + len(chunk.tokens) for chunk in chunks)
        self.block_size, self.longest = block_size, longest
        self.blocks = -(-longest // block_size)
        sequences = max(chunk.sequence for chunk in chunks) + 1
        self.tensors: dict[str, Any] = {}
        for i, cache in enumerate(graph.caches):
            for part in "kv":
                shape = (sequences * self.blocks, cache.kv_heads, block_size, cache.width(part))
                zeros = partial(torch.zeros, shape, dtype=cache.dtype)
                self.tensors[f"kv_cache_{i}_{part}"] = OnRanks.each(graph.ranks, zeros)
        pools = () if graph.adapters is None else graph.adapters.names()
        for node in graph.inputs() if pools else ():
            if node.name in pools:
                self.tensors[node.name] = torch.zeros(tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype)
        for state in graph.states:
            self.tensors[f"state_{state.index}"] = torch.full((sequences, *state.shape), torch.nan)

    def table(self, sequence: int) -> list[int]:
        """The blocks of a sequence; every other one is given out backwards, so that order is seen to matter."""
        first = sequence * self.blocks
        blocks = list(range(first, first + self.blocks))
        return blocks[::-1] if sequence % 2 else blocks

    def cut_table(self, policy: CachePolicy, sequence: int, tokens: int) -> list[int]:
        """The blocks in a sequence's table after `tokens` tokens."""
        blocks = self.table(sequence)
        for _, cut in policy.cuts_before(tokens + 1, self.longest):
            for rows in reversed(cut.leaving):
                del blocks[rows.start // self.block_size : rows.stop // self.block_size]
        return blocks

    def slot(self, blocks: Sequence[int], row: int) -> int:
        """The place of a row."""
        return blocks[row // self.block_size] * self.block_size + row % self.block_size


def _run_step(graph: ModelGraph, tensors: dict[str, Any], caches: _Caches, step: Sequence[Chunk]) -> list[Tensor]:
    for group in range(1, 1 + len(graph.policies)):
        for chunk in step:
            _move_rows(graph, tensors, group, caches, chunk)
    logits = interpret(graph, tensors | _step_inputs(graph, caches, step))
    return list(logits.float().split([len(chunk.tokens) for chunk in step]))


def _cut_tables(policy: CachePolicy, caches: _Caches, step: Sequence[Chunk]) -> dict[str, Tensor]:
    """The step inputs of a policy that drops rows: tables without the dropped blocks, and shorter contexts."""
    if not policy.drops_rows:
        return {}
    tables, lengths = torch.zeros(len(step), caches.blocks, dtype=torch.int32), list[int]()
    slots = torch.zeros(sum(len(chunk.tokens) for chunk in step), dtype=torch.int32)
    begin = 0
    for row, chunk in zip(tables, step, strict=True):
        blocks = caches.cut_table(policy, chunk.sequence, chunk.start)
        row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        dropped = (caches.blocks - len(blocks)) * caches.block_size
        for position in range(chunk.start, chunk.start + len(chunk.tokens)):
            slots[begin] = caches.slot(blocks, position - dropped)
            begin += 1
        lengths.append(chunk.start + len(chunk.tokens) - dropped)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return {"context_lens": lens, "block_tables": tables, "slot_mapping": slots}


def _move_rows(graph: ModelGraph, tensors: dict[str, Any], group: int, caches: _Caches, chunk: Chunk) -> None:
    """Move rows in each cache of the group if its table is cut before the chunk."""
    policy = graph.policies[group - 1]
    cut = dict(policy.cuts_before(chunk.start + 1, caches.longest)).get(chunk.start)
    if cut is None or not cut.leaving:
        return
    before = caches.cut_table(policy, chunk.sequence, chunk.start - 1)
    dropped = (caches.blocks - len(before)) * caches.block_size
    if cut.chosen and step_input(graph, COMPACTION) is not None:
        rows = chunk.start - dropped
        held, kept = (before[: -(-count // caches.block_size)] for count in (rows, cut.chosen))
        compaction = torch.tensor([rows, cut.chosen, 0, chunk.start, cut.pinned, *held, *kept], dtype=torch.int32)
        GraphInterpreter(graph.graph).run_readers(COMPACTION, tensors | {COMPACTION: compaction})
        return
    sources = torch.tensor([caches.slot(before, row) for row in cut.sources])
    destinations = torch.tensor([caches.slot(before, row) for row in cut.destinations])
    for index, spec in enumerate(graph.caches):
        for part in "kv" if spec.group == group and cut.sources else "":
            value = caches.tensors[f"kv_cache_{index}_{part}"]
            for tensor in value.values if isinstance(value, OnRanks) else (value,):
                views = cache_views(spec.slot(), part, tensor.view(torch.uint8), caches.block_size)
                move_slots(views, sources, destinations)


def _step_inputs(graph: ModelGraph, caches: _Caches, step: Sequence[Chunk]) -> dict[str, Any]:
    lengths = [len(chunk.tokens) for chunk in step]
    positions = [chunk.start + i for chunk in step for i in range(len(chunk.tokens))]
    turned = [policy for policy in graph.policies if policy.renumbers and step_input(graph, COMPACTION) is not None]
    back = [
        len(caches.table(chunk.sequence)) - len(caches.cut_table(policy, chunk.sequence, chunk.start))
        for policy in turned
        for chunk in step
        for _ in chunk.tokens
    ]
    owners = [caches.table(chunk.sequence) for chunk in step for _ in chunk.tokens]
    size = caches.block_size
    values = {
        "input_ids": [t for chunk in step for t in chunk.tokens],
        "positions": [p - size * blocks for p, blocks in zip(positions, back, strict=True)] if turned else positions,
        "slot_mapping": [table[p // size] * size + p % size for table, p in zip(owners, positions, strict=True)],
        "query_starts": [sum(lengths[:i]) for i in range(len(lengths) + 1)],
        "context_lens": [chunk.start + len(chunk.tokens) for chunk in step],
        "block_tables": [caches.table(chunk.sequence) for chunk in step],
        "logit_rows": list(range(len(positions))),
        STATE_SLOTS: [chunk.sequence for chunk in step],
    }
    inputs = {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}
    inputs |= {name: torch.zeros(len(positions), dtype=torch.int32) for name in (ADAPTERS, ROW_ADAPTERS)}
    inputs |= {name: inputs[of_first] for name, of_first in group_inputs(graph).items()}
    for group, policy in enumerate(graph.policies, 1):
        inputs |= {group_input(name, group): value for name, value in _cut_tables(policy, caches, step).items()}
    inputs[COMPACTION] = torch.zeros(0, dtype=torch.int32)
    inputs["tree_masks"] = torch.zeros(len(positions), dtype=torch.int64)
    hidden = _hidden(graph, torch.tensor(positions))
    return hidden | {n.name: inputs[n.name] for n in graph.inputs() if n.name in inputs}
