"""Compare a kernel's machine code with its budget, and say what a missed limit costs in time."""

from dataclasses import dataclass

from llmc.codegen.triton.machine_code.budget import Budget, Limit
from llmc.codegen.triton.machine_code.device_limits import bandwidth_in_flight, issue_rate
from llmc.codegen.triton.machine_code.figures import KernelCode


@dataclass(frozen=True)
class Finding:
    """One figure of a kernel beside its limit.

    Attributes:
        limit: The bound and its reason.
        value: The figure; None if the machine code does not show it.
        is_met: Whether it keeps to the bound.
    """

    limit: Limit
    value: float | None
    is_met: bool

    def seconds(self, code: KernelCode, bytes_moved: float, launches: int = 1) -> float | None:
        """Time that launches lose by the miss, beyond what their bytes take; None where no model says it.

        Args:
            code: The kernel.
            bytes_moved: Bytes that the launches must move in total.
            launches: Number of launches.
        """
        if self.is_met or self.value is None:
            return None
        target = code.target
        at_best = bytes_moved / target.bandwidth
        if self.limit.figure == "instructions_per_byte":
            return max(0.0, self.value * bytes_moved / target.warp_size / issue_rate(target) - at_best)
        if self.limit.figure == "bytes_in_flight":
            return bytes_moved / bandwidth_in_flight(target, max(1.0, self.value)) - at_best
        if self.limit.figure == "exits_before_wait":
            return target.launch * launches  # None overlaps with the one before.
        return None


def check_budget(code: KernelCode, budget: Budget) -> tuple[Finding, ...]:
    """Each limit of the budget that says something of the kernel's target, with the kernel's figure."""
    found = []
    for limit in budget.all_limits:
        if limit.is_for(code.target):
            figure = getattr(code, limit.figure)
            value = None if figure is None else float(figure)
            found.append(Finding(limit, value, value is not None and limit.is_met(value, code.target)))
    return tuple(found)
