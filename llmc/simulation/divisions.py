"""The ways to divide ranks among replicas, and each replica's among stages and parts of weights."""

from collections.abc import Iterator
from dataclasses import dataclass

from llmc.errors import OptionError
from llmc.plural import counted
from llmc.program import RankLayout


@dataclass(frozen=True)
class Division:
    """A division of ranks into replicas, stages and tensor ranks. layout: the layout of one replica."""

    layout: RankLayout
    replicas: int

    def __str__(self) -> str:
        return f"TP {self.layout.tensor} × PP {self.layout.pipeline} × {self.replicas}"


def divisions(ranks: int) -> tuple[Division, ...]:
    """Return every division that uses all ranks, in descending number of ranks that share weights. Raises OptionError
    for zero ranks."""
    if not 1 <= ranks <= 1024:
        raise OptionError(f"there cannot be {counted(ranks, 'rank')}", at=f"--ranks {ranks}", fix="give 1 to 1024")
    candidates = [
        Division(RankLayout(tensor, pipeline), ranks // tensor // pipeline)
        for tensor in _divisors(ranks)
        for pipeline in _divisors(ranks // tensor)
        if tensor <= 64 and pipeline <= 64
    ]
    return tuple(sorted(candidates, key=lambda division: (-division.layout.tensor, division.layout.pipeline)))


def division_of(layout: RankLayout, ranks: int) -> Division:
    """The replicas of one layout that the ranks make up. Raises OptionError if ranks are left over."""
    if ranks < 1 or ranks % layout.ranks:
        raise OptionError(
            f"{counted(ranks, 'rank')} cannot be divided into replicas of {layout.ranks}",
            at=f"--ranks {ranks}",
            fix=f"give a multiple of {layout.ranks}, or name the model, which can be cut otherwise",
        )
    return Division(layout, ranks // layout.ranks)


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)
