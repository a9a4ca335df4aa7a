"""The first rank's message to each started rank: its rank, memory and threads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlan:
    """The plan from which a rank starts. blocks: of each rank's cache. threads: of its steps, on the first rank's
    machine. exchange_bytes: of the memory that the collectives of a stage use. executor: of the first rank, where
    others exist."""

    rank: int
    ranks: int
    blocks: int
    threads: int
    exchange_bytes: int
    executor: str | None = None
