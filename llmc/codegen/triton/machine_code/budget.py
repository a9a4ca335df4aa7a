"""Budgets for a kernel's machine code: data in the kernel's own file, each limit with its reason."""

from collections.abc import Callable
from dataclasses import dataclass

from llmc.codegen.triton.machine_code.device_limits import bytes_to_keep_in_flight
from llmc.targets import GpuTarget

Bound = float | Callable[[GpuTarget], float]


@dataclass(frozen=True)
class Limit:
    """A bound on one figure of a kernel.

    Attributes:
        figure: Name of a property of `KernelCode`, such as `instructions_per_byte`.
        reason: Why the figure must be within the bound, from the machine's limits.
        at_most, at_least: The bound, or a function of the target that gives it. One of them is None.
        arches: Compute capabilities that the limit is for; None for all.
    """

    figure: str
    reason: str
    at_most: Bound | None = None
    at_least: Bound | None = None
    arches: tuple[int, ...] | None = None

    def bound(self, target: GpuTarget) -> float:
        """The bound on a target."""
        bound = self.at_most if self.at_most is not None else self.at_least
        assert bound is not None, f"the limit of {self.figure} has no bound"
        return bound(target) if callable(bound) else bound

    def is_for(self, target: GpuTarget) -> bool:
        """Whether it says something of kernels for the target."""
        return self.arches is None or target.arch in self.arches

    def is_met(self, value: float, target: GpuTarget) -> bool:
        """Whether a figure keeps to the bound."""
        bound = self.bound(target)
        return value <= bound if self.at_most is not None else value >= bound

    def text(self, target: GpuTarget) -> str:
        """The bound in words, such as `≤ 3`."""
        return f"{'≤' if self.at_most is not None else '≥'} {self.bound(target):g}"


@dataclass(frozen=True)
class Budget:
    """The limits for the machine code of one kernel.

    Attributes:
        function: Name of the @triton.jit function.
        limits: Bounds on its figures, in addition to those of `EVERY_KERNEL`.
        streams: Pointer parameters whose memory bounds the kernel: it reads each byte once.
    """

    function: str
    limits: tuple[Limit, ...] = ()
    streams: tuple[str, ...] = ()

    @property
    def all_limits(self) -> tuple[Limit, ...]:
        return EVERY_KERNEL + self.limits


# Compute capabilities with programmatic dependent launch: a kernel starts while the one before ends, and waits for its
# results. Source: CUDA programming guide, "Programmatic dependent launch".
_DEPENDENT_LAUNCH = (90, 100)
EVERY_KERNEL = (
    Limit("stack_bytes", "a stack or a spill is memory traffic that no result needs", at_most=0),
    Limit("unfused_multiplies", "a product and a sum are one instruction", at_most=0),
    Limit(
        "exits_before_wait",
        "a block that ends without waiting lets the next launch start too early",
        at_most=0,
        arches=_DEPENDENT_LAUNCH,
    ),
    Limit(
        "stores_before_wait",
        "the launch before may still read the memory that is reused",
        at_most=0,
        arches=_DEPENDENT_LAUNCH,
    ),
)

# Limits of a kernel that reads much memory once: the weights for few tokens, or a cache.
_READ_ONCE = (
    Limit("narrow_loads", "a load of 16 bytes per thread takes as long as a narrower one", at_most=0),
    Limit(
        "bytes_in_flight",
        "with fewer bytes in flight the memory is idle while they arrive",
        at_least=bytes_to_keep_in_flight,
    ),
)
# Each of an H200's four schedulers issues one instruction per cycle, and must process 4.8 bytes per cycle. At three
# instructions per byte, half of the cycles are left for instructions outside of the loop and for stalls.
STREAMING = (
    Limit("instructions_per_byte", "the schedulers issue no more in the time that memory takes per byte", at_most=3),
    *_READ_ONCE,
)
# Limits of a kernel that reads few bytes of scales along with its codes, and reads a cache through a table of blocks.
READ_ONCE = _READ_ONCE
# Launches follow each other every few microseconds. Weights do not depend on the launch before, so they are loaded
# while it still runs.
EDGE_FREE = (
    Limit(
        "releases_dependents_first",
        "blocks of the next launch start on free multiprocessors while this one runs",
        at_least=1,
        arches=_DEPENDENT_LAUNCH,
    ),
    Limit(
        "stream_loads_before_wait",
        "weights are being loaded while the launch before ends",
        at_least=1,
        arches=_DEPENDENT_LAUNCH,
    ),
)
