"""Which part of each weight a rank has, and what ranks tell each other, as reports keep it: read without torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.program import Program

# Bytes of an element of the rows that a stage hands over, which are in fp32.
_HANDED_OVER = 4


@dataclass(frozen=True)
class PlacedWeight:
    """Weights that differ by the numbers in their names only. name: with * for those. shape: of all ranks together.

    axis: that is cut, None for one that every rank has whole. parts: elements of it on each rank. length: with padding.
    nbytes: of one of them on one rank. why: what decided it. runs: equal pieces of the axis, such as those of experts,
    of each of which a rank has a part.
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
    """Collectives that differ by their layer only. of: what they add up or join. token_bytes: that every rank has in
    the end, for each token, or for each row of logits. chosen_bytes: of logits, what ranks of CPUs exchange in their
    place for a row of which only the token is wanted."""

    op: str
    of: str
    count: int
    token_bytes: int
    chosen_bytes: int | None = None


@dataclass(frozen=True)
class Placements:
    """Of a stage that is cut for so many ranks; nothing of one that a single rank runs."""

    ranks: int = 1
    weights: tuple[PlacedWeight, ...] = ()
    collectives: tuple[PlacedCollective, ...] = ()


@dataclass(frozen=True)
class RankBytes:
    """Of one rank. kv_token: of the cache, a token; kv_less: of that in layers that do not keep everything. arena: of
    the largest step."""

    weights: int
    kv_token: int
    kv_less: int
    arena: int


@dataclass(frozen=True)
class StageRanks:
    """A pipeline stage: its ranks, the first and the last; the memory of one of them; what each hands over for a token,
    in bytes, none behind the last stage."""

    first: int
    last: int
    memory: RankBytes
    token_bytes: int


def stage_ranks(stages: Sequence[Program]) -> tuple[StageRanks, ...]:
    """Of an engine's stages in order; one that is not cut has one."""
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
    """What a rank of a program keeps in memory."""
    limits = program.limits
    return RankBytes(
        weights=sum(slot.nbytes for slot in program.weights),
        kv_token=sum(program.token_bytes()),
        kv_less=sum(program.token_bytes()[1:]),
        arena=program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows),
    )
