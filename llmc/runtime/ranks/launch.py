"""The environment of processes that torchrun starts: their rank, and the address where they meet."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from llmc.errors import RankError

_BY_LLMC = "unset RANK and WORLD_SIZE to have llmc start the ranks of this machine by itself"


@dataclass(frozen=True)
class Launch:
    """The place of a rank among all ranks. local_rank, local_ranks: its number on its machine, and the number of ranks
    there. address, port: where the first rank's machine is reached."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int

    def check(self, ranks: int) -> None:
        """Raise RankError unless the engine's number of ranks equals the number of processes."""
        if ranks != self.ranks:
            raise RankError(
                f"the engine was built for {ranks} ranks, and {self.ranks} processes were started",
                at=f"WORLD_SIZE={self.ranks}",
                fix=f"have torchrun start {ranks}, nodes times processes per node, or {_BY_LLMC}",
            )


def refuse_launched(what: str, *, at: str, fix: str) -> None:
    """Raise RankError in a process that torchrun has started, for a feature that starts its own ranks."""
    launch = launched(os.environ)
    if launch is not None:
        raise RankError(
            f"torchrun has started {launch.ranks} processes, the ranks of one engine, and {what} starts its own ranks",
            at=at,
            fix=fix,
        )


def launched(environ: Mapping[str, str]) -> Launch | None:
    """The launch environment of this process; None if it was started alone. Raises RankError if it is inconsistent."""
    if "RANK" not in environ or environ.get("WORLD_SIZE", "1") == "1":
        return None
    rank, ranks = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank >= ranks:
        raise RankError(f"there is no rank {rank} of {ranks}", at=f"RANK={rank}, WORLD_SIZE={ranks}", fix=_BY_LLMC)
    if not environ.get("MASTER_ADDR"):
        raise RankError(
            f"rank {rank} of {ranks} has no address of the first rank",
            at="MASTER_ADDR",
            fix=f"start all of them with torchrun, or {_BY_LLMC}",
        )
    return Launch(
        rank,
        ranks,
        _number(environ, "LOCAL_RANK", 0),
        _number(environ, "LOCAL_WORLD_SIZE", 1),
        environ["MASTER_ADDR"],
        _number(environ, "MASTER_PORT"),
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RankError(f"{name} is not a number: {text!r}", at=name, fix=f"start with torchrun, or {_BY_LLMC}")
    return int(text)
