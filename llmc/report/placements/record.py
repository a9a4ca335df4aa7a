"""The record of weights and collectives per rank in reports. Reading it does not need torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.program import Program

# Bytes of an element of the rows that a stage hands over, which are in fp32.
_HANDED_OVER = 4


@dataclass(frozen=True)
class PlacedWeight:
    """Weights that differ by the numbers in their names only. name: the name, with * for those numbers. shape: the
    shape of the whole weight, over all ranks.

    axis: the axis that is split; None if every rank holds all of it. parts: number of its elements on each rank.
    length: the axis with padding. nbytes: bytes of one weight on one rank. why: the reason. runs: number of equal
    pieces of the axis, such as experts, each of which is split.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    axis: int | None
    parts: tuple[int, ...]
    length: int
    nbytes: int
    why: str
    runs: int = 1


@dataclass(frozen=True)
class PlacedCollective:
    """Collectives that differ in their layer only. of: the tensor that they sum or join. token_bytes: size of the
    result per token, or per row of logits. chosen_bytes: for logits, bytes that ranks on CPUs exchange instead per row
    if only the token is needed."""

    op: str
    of: str
    count: int
    token_bytes: int
    chosen_bytes: int | None = None


@dataclass(frozen=True)
class Placements:
    """The placements of one pipeline stage; empty for a stage with a single rank."""

    ranks: int = 1
    weights: tuple[PlacedWeight, ...] = ()
    collectives: tuple[PlacedCollective, ...] = ()


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank. kv_token: bytes of the cache per token; kv_less: the share of layers that do not keep
    everything. arena: size for the largest step."""

    weights: int
    kv_token: int
    kv_less: int
    arena: int


@dataclass(frozen=True)
class StageRanks:
    """A pipeline stage: its ranks, the first and the last; the memory of one of them; what each hands over for a token,
    in bytes, none after the last stage."""

    first: int
    last: int
    memory: RankBytes
    token_bytes: int


def stage_ranks(stages: Sequence[Program]) -> tuple[StageRanks, ...]:
    """The ranks of each pipeline stage, in order."""
    return tuple(
        StageRanks(
            stage.layout.rank_of(stage.stage, 0),
            stage.layout.rank_of(stage.stage, stage.layout.tensor - 1),
            rank_bytes(stage),
            _HANDED_OVER * stage.hands_over,
        )
        for stage in stages
    )


def rank_bytes(program: Program) -> RankBytes:
    """The memory of one rank of a program."""
    limits = program.limits
    return RankBytes(
        weights=sum(slot.nbytes for slot in program.weights),
        kv_token=sum(program.token_bytes()),
        kv_less=sum(program.token_bytes()[1:]),
        arena=program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows),
    )
