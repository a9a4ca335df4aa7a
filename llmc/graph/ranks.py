"""All ranks of a partitioned graph at once, in one process: what differs between them is a value on each.

An op runs on each rank's operands in turn; a collective sees those of all, and gives all of them the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmc.graph.op_record import RECORDS
from llmc.graph.weights import Recipe, WeightSource, evaluate, is_per_rank


@dataclass(frozen=True, eq=False)
class OnRanks:
    """What an op's result or an input is on each rank."""

    values: tuple[Any, ...]

    @staticmethod
    def each(ranks: int, make: Callable[[], Any]) -> Any:
        """What `make` gives anew for each rank; of a single one as it is."""
        return make() if ranks == 1 else OnRanks(tuple(make() for _ in range(ranks)))


def weight_value(recipe: Recipe, source: WeightSource, ranks: int) -> Tensor | OnRanks:
    """The tensor that a recipe stands for, on each rank where they differ."""
    if not is_per_rank(recipe):
        return evaluate(recipe, source)
    return OnRanks(tuple(evaluate(recipe, source, rank) for rank in range(ranks)))


def on_ranks(tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor | OnRanks]:
    """What names stand for on all ranks, given what they stand for on each."""
    first, *others = tensors
    if not others:
        return dict(first)
    return {name: OnRanks(tuple(each[name] for each in tensors)) for name in first}


def first_rank(value: Any) -> Any:
    return value.values[0] if isinstance(value, OnRanks) else value


def copied(value: Any) -> Any:
    """A tensor of its own, on each rank."""
    return OnRanks(tuple(map(copied, value.values))) if isinstance(value, OnRanks) else value.clone()


def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op's result; on each rank where an operand differs."""
    ranks = {len(each.values) for each in _on_ranks((args, tuple(kwargs.values())))}
    if not ranks:
        return target(*args, **kwargs)
    (count,) = ranks
    record = RECORDS.get(target)
    if record is not None and record.across is not None:
        shared, named = _of(args[1:], 0), {name: _of(value, 0) for name, value in kwargs.items()}
        return record.across([_of(args[0], rank) for rank in range(count)], *shared, **named)
    results = tuple(
        target(*_of(args, rank), **{name: _of(value, rank) for name, value in kwargs.items()}) for rank in range(count)
    )
    if isinstance(results[0], tuple):
        return tuple(map(OnRanks, zip(*results, strict=True)))
    return None if results[0] is None else OnRanks(results)


def _on_ranks(value: Any) -> list[OnRanks]:
    if isinstance(value, tuple | list):
        return [found for each in value for found in _on_ranks(each)]
    return [value] if isinstance(value, OnRanks) else []


def _of(value: Any, rank: int) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_of(each, rank) for each in value)
    return value.values[rank] if isinstance(value, OnRanks) else value
