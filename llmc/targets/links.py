"""Links between the ranks of a model, and the time of a collective: start + steps · hop + moved / bandwidth.

This is the α–β model (Hockney 1994), with the constants by which NCCL itself chooses among its protocols
(src/graph/tuning.cc: baseLat, hwLat, llMaxBws; src/graph/topo.h: bandwidths; RCCL's topo.h for xGMI):

    ring   every rank sends its neighbour a part, 2 (n − 1) times: moved = 2 (n − 1) / n · bytes. Two protocols: one
           with a flag in each word of 8 bytes, which begins early and has half the bandwidth at most, and a plain one.
    shot   every rank reads what all others have, between two barriers: moved = (n − 1) · bytes
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Protocol:
    """A protocol of a ring. start, hop: seconds of latency at the start and per step. bandwidth: bytes per second of a
    rank."""

    start: float
    hop: float
    bandwidth: float


@dataclass(frozen=True)
class Shot:
    """A one-shot exchange. start: seconds of one that moves nothing. most: bytes for which it is used; None for any."""

    start: float
    most: int | None = None


@dataclass(frozen=True)
class Link:
    """A link between ranks. bandwidth: bytes per second that a rank sends while it receives as much. protocols: those
    of its ring. shot: one-shot exchange; None if ranks cannot read each other's memory."""

    name: str
    bandwidth: float
    protocols: tuple[Protocol, ...]
    shot: Shot | None = None

    def all_reduce(self, nbytes: float, ranks: int, *, custom: bool = True) -> float:
        """Seconds until every rank has the sum of values of `nbytes` bytes. custom: one-shot exchange is allowed."""
        if ranks == 1:
            return 0.0
        return min(self._ring(2 * (ranks - 1), nbytes, ranks), self._shot(nbytes, ranks, custom))

    def all_gather(self, nbytes: float, ranks: int, *, custom: bool = True) -> float:
        """Seconds until every rank has all `nbytes` bytes, each rank starting with its part."""
        if ranks == 1:
            return 0.0
        return min(self._ring(ranks - 1, nbytes, ranks), self._shot(nbytes / ranks, ranks, custom))

    def send(self, nbytes: float) -> float:
        """Seconds until another rank has what one sends it."""
        return self._ring(1, nbytes, 1)

    def _ring(self, steps: int, nbytes: float, ranks: int) -> float:
        moved = steps / ranks * nbytes
        return min(protocol.start + steps * protocol.hop + moved / protocol.bandwidth for protocol in self.protocols)

    def _shot(self, nbytes: float, ranks: int, custom: bool) -> float:
        shot = self.shot
        if shot is None or not custom or (shot.most is not None and nbytes > shot.most):
            return math.inf
        return shot.start + (ranks - 1) * nbytes / self.bandwidth


@dataclass(frozen=True)
class Links:
    """The links of a machine. within: the link between the ranks of one machine, at most `size`. between: the link
    between machines."""

    within: Link
    between: Link
    size: int

    def of(self, ranks: int) -> Link:
        """The link between this many ranks."""
        return self.within if ranks <= self.size else self.between


# A one-shot all-reduce of 512 KB on four H100s takes 10 µs (vLLM, pull request 24532), and its 1.5 MB 4 µs of them at
# 371 GB/s. More goes around the ring: what a shot reads grows with the ranks.
_CUSTOM = Shot(6e-6, most=512 << 10)


def _ring(flagged_hop: float, plain_hop: float, bandwidth: float, flagged: float) -> tuple[Protocol, ...]:
    """NCCL's two: LL, Simple."""
    return Protocol(6.6e-6, flagged_hop, min(flagged, bandwidth / 2)), Protocol(8.4e-6, plain_hop, bandwidth)


def _nvlink(generation: str, bandwidth: float, flagged: float) -> Link:
    return Link(f"NVLink {generation}", bandwidth, _ring(0.6e-6, 3.4e-6, bandwidth, flagged), _CUSTOM)


# NCCL counts 20, 20.6 and 40.1 GB/s for each of 12, 18 and 18 links.
NVLINK_3 = _nvlink("3", 12 * 20.0e9, 87.7e9)
NVLINK_4 = _nvlink("4", 18 * 20.6e9, 141e9)
NVLINK_5 = _nvlink("5", 18 * 40.1e9, 282e9)
# 48 GB/s for each of seven, as RCCL counts; the latencies are those of NVLink.
XGMI_MI300 = Link("xGMI", 7 * 48.0e9, _ring(0.6e-6, 3.4e-6, 7 * 48.0e9, 141e9), _CUSTOM)
# 16 lanes of the fourth generation, twice NCCL's 12 GB/s of the third.
PCIE_4 = Link("PCIe 4", 24e9, _ring(1.0e-6, 5.7e-6, 24e9, 24e9))
# A card of 200 or 400 Gbit/s for each GPU.
INFINIBAND_HDR = Link("InfiniBand HDR", 25e9, _ring(2.7e-6, 14.0e-6, 25e9, 25e9))
INFINIBAND_NDR = Link("InfiniBand NDR", 50e9, _ring(2.7e-6, 14.0e-6, 50e9, 50e9))
# Measured between two processes of one machine, each with a core: 8 KiB and 512 KiB take 7 and 54 µs through shared
# memory, 218 and 395 µs with gloo.
SHARED_MEMORY = Link("shared memory", 11e9, (Protocol(6.3e-6, 0.0, 11e9),), Shot(6.3e-6))
GLOO = Link("TCP (gloo)", 2.9e9, (Protocol(215e-6, 0.0, 2.9e9),))

LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "nvlink-3": NVLINK_3,
        "nvlink-4": NVLINK_4,
        "nvlink-5": NVLINK_5,
        "xgmi": XGMI_MI300,
        "pcie-4": PCIE_4,
        "infiniband-hdr": INFINIBAND_HDR,
        "infiniband-ndr": INFINIBAND_NDR,
    }
)
