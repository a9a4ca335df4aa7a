"""How fast a machine works: what was measured of it, or its data sheet's numbers."""

from dataclasses import dataclass, replace
from itertools import pairwise

from llmc.targets import GpuTarget


@dataclass(frozen=True)
class Reach:
    """The share of `multiply` that a kernel reaches with `rows` rows."""

    rows: int
    share: float


@dataclass(frozen=True)
class KindRates:
    """How fast one kind of kernel works.

    multiply: best FLOP per second on operands in cache. reach: the share of it by number of rows, ascending; empty if
    the best holds for any number. pack: elements of x packed per second; None if nothing is packed. serial: the
    fraction of the shorter of transfer and arithmetic that the longer does not hide; above 1 if memory is read more
    slowly than in one long stream. bandwidth: bytes per second if memory is not read as a stream; None takes the
    machine's.
    """

    multiply: float
    reach: tuple[Reach, ...] = ()
    pack: float | None = None
    serial: float = 0.0
    bandwidth: float | None = None

    def share(self, rows: float) -> float:
        """The share of `multiply` with `rows` rows. Between two measured numbers of rows, the total time is
        interpolated linearly. Below them it is that of the smallest; above them it grows in proportion."""
        if not self.reach:
            return 1.0
        first, last = self.reach[0], self.reach[-1]
        for few, many in pairwise(self.reach):
            if few.rows <= rows <= many.rows:
                part = (rows - few.rows) / (many.rows - few.rows)
                return rows / ((1 - part) * few.rows / few.share + part * many.rows / many.share)
        return last.share if rows > last.rows else first.share * rows / first.rows

    def divided(self, ranks: int) -> "KindRates":
        """The rates of each of `ranks` ranks with equal parts."""
        pack = None if self.pack is None else self.pack / ranks
        bandwidth = None if self.bandwidth is None else self.bandwidth / ranks
        return replace(self, multiply=self.multiply / ranks, pack=pack, bandwidth=bandwidth)


@dataclass(frozen=True)
class Rates:
    """The rates of a machine.

    bandwidth: bytes per second. kinds: rates by a launch's kind (`kind_of`). launch: seconds to share a launch's work
    among threads. measured: on this machine, not from a data sheet.
    """

    bandwidth: float
    kinds: dict[str, KindRates]
    launch: float
    measured: bool

    def of(self, kind: str) -> KindRates:
        """The rates of a kind. A kind that was not measured is assumed to multiply as fast as the fastest."""
        known = self.kinds.get(kind)
        return KindRates(max(rates.multiply for rates in self.kinds.values())) if known is None else known

    def of_a_rank(self, ranks: int, threads: int) -> "Rates":
        """The rates of each of `ranks` ranks that run at the same time, given the rates of all their threads together.
        A rank with a single thread has no cost of sharing work."""
        if ranks == 1:
            return self
        kinds = {name: kind.divided(ranks) for name, kind in self.kinds.items()}
        return Rates(self.bandwidth / ranks, kinds, self.launch if threads > ranks else 0.0, self.measured)


def gpu_rates(target: GpuTarget) -> Rates:
    """The data sheet's; a launch costs nothing, since decode steps run as graphs."""
    kinds = {dtype: KindRates(target.rate(dtype)) for dtype in ("F32", "F16", "BF16")}
    return Rates(target.bandwidth, kinds, 0.0, measured=False)
