"""The first rank's message to each started rank: its rank, memory and threads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlan:
    """The plan from which a rank starts. blocks: number of blocks of each rank's cache. threads: number of threads of
    its steps, on the first rank's machine. exchange_bytes: bytes of the memory that the collectives of a stage use.
    executor: the executor of the first rank, if others exist."""

    rank: int
    ranks: int
    blocks: int
    threads: int
    exchange_bytes: int
    executor: str | None = None
