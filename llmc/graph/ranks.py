"""Run all ranks of a partitioned graph in one process: a value that differs between ranks has one tensor per rank.

An op runs once per rank, on that rank's operands. A collective reads the operands of all ranks and returns the same
value to all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from llmc.graph.op_record import RECORDS
from llmc.graph.weights import Recipe, WeightSource, evaluate, is_per_rank


@dataclass(frozen=True, eq=False)
class OnRanks:
    """The value of an op's result or of an input on each rank."""

    values: tuple[Any, ...]

    @staticmethod
    def each(ranks: int, make: Callable[[], Any]) -> Any:
        """Call `make` once per rank; with a single rank, its result as it is."""
        return make() if ranks == 1 else OnRanks(tuple(make() for _ in range(ranks)))


def weight_value(recipe: Recipe, source: WeightSource, ranks: int) -> Tensor | OnRanks:
    """The tensor that a recipe describes, per rank where ranks differ."""
    if not is_per_rank(recipe):
        return evaluate(recipe, source)
    return OnRanks(tuple(evaluate(recipe, source, rank) for rank in range(ranks)))


def on_ranks(tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor | OnRanks]:
    """Merge the tensors of each rank into one mapping of names to per-rank values."""
    first, *others = tensors
    if not others:
        return dict(first)
    return {name: OnRanks(tuple(shard[name] for shard in tensors)) for name in first}


def first_rank(value: Any) -> Any:
    return value.values[0] if isinstance(value, OnRanks) else value


def copied(value: Any) -> Any:
    """A separate tensor on each rank."""
    return OnRanks(tuple(map(copied, value.values))) if isinstance(value, OnRanks) else value.clone()


def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op's result; on each rank where an operand differs."""
    ranks = {len(leaf.values) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnRanks)}
    if not ranks:
        return target(*args, **kwargs)
    (count,) = ranks

    def on_rank(rank: int) -> Any:
        return tree_map_only(OnRanks, lambda shards: shards.values[rank], (args, kwargs))

    per_rank = [on_rank(rank) for rank in range(count)]
    record = RECORDS.get(target)
    if record is not None and record.across is not None:
        (_, *shared), named = per_rank[0]
        return record.across([own[0] for own, _ in per_rank], *shared, **named)
    results = tuple(target(*own, **named) for own, named in per_rank)
    if isinstance(results[0], tuple):
        return tuple(map(OnRanks, zip(*results, strict=True)))
    return None if results[0] is None else OnRanks(results)
