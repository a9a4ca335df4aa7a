"""How fast a machine works: what was measured of it, or its data sheet's numbers."""

from dataclasses import dataclass, replace
from itertools import pairwise

from llmc.targets import GpuTarget


@dataclass(frozen=True)
class Reach:
    """The share of `multiply` that a kernel reaches with so many rows."""

    rows: int
    share: float


@dataclass(frozen=True)
class KindRates:
    """How fast one kind of kernel works.

    multiply: FLOP a second of its arithmetic on operands in cache, at best. reach: what it gets to with how many rows,
    fewest first; none: its best with any. pack: elements of x a second; None where nothing is packed. serial: the part
    of the shorter of transfer and arithmetic that the longer does not hide; above 1 where memory is read slower than
    in one long stream. bandwidth: bytes a second where memory is not read in a stream at all; None: the machine's.
    """

    multiply: float
    reach: tuple[Reach, ...] = ()
    pack: float | None = None
    serial: float = 0.0
    bandwidth: float | None = None

    def share(self, rows: float) -> float:
        """The share of `multiply` with so many rows. Between two that were measured, the time of all rows together
        grows evenly; beyond them, it is that of the nearest for fewer rows and in proportion for more."""
        if not self.reach:
            return 1.0
        first, last = self.reach[0], self.reach[-1]
        for few, many in pairwise(self.reach):
            if few.rows <= rows <= many.rows:
                part = (rows - few.rows) / (many.rows - few.rows)
                return rows / ((1 - part) * few.rows / few.share + part * many.rows / many.share)
        return last.share if rows > last.rows else first.share * rows / first.rows

    def divided(self, ranks: int) -> "KindRates":
        """Of each of so many that have equal parts."""
        pack = None if self.pack is None else self.pack / ranks
        bandwidth = None if self.bandwidth is None else self.bandwidth / ranks
        return replace(self, multiply=self.multiply / ranks, pack=pack, bandwidth=bandwidth)


@dataclass(frozen=True)
class Rates:
    """What a machine delivers.

    bandwidth: bytes a second. kinds: by a launch's kind (`kind_of`). launch: seconds to share a launch's work among
    threads. measured: on this machine, not from a data sheet.
    """

    bandwidth: float
    kinds: dict[str, KindRates]
    launch: float
    measured: bool

    def of(self, kind: str) -> KindRates:
        """The kind's; one that nobody measured is taken to multiply as fast as any."""
        known = self.kinds.get(kind)
        return KindRates(max(each.multiply for each in self.kinds.values())) if known is None else known

    def of_a_rank(self, ranks: int, threads: int) -> "Rates":
        """Of each of so many ranks that work at the same time, if these are of all their threads together. One that
        has a single thread shares its work with nobody."""
        if ranks == 1:
            return self
        kinds = {name: kind.divided(ranks) for name, kind in self.kinds.items()}
        return Rates(self.bandwidth / ranks, kinds, self.launch if threads > ranks else 0.0, self.measured)


def gpu_rates(target: GpuTarget) -> Rates:
    """The data sheet's; a launch costs nothing, since decode steps run as graphs."""
    kinds = {dtype: KindRates(target.rate(dtype)) for dtype in ("F32", "F16", "BF16")}
    return Rates(target.bandwidth, kinds, 0.0, measured=False)
