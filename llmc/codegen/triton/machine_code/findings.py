"""Compare a kernel's machine code with its budget, and say what a missed limit costs in time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llmc.codegen.triton.machine_code.budget import Budget, Limit
from llmc.codegen.triton.machine_code.budget_table import budgets
from llmc.codegen.triton.machine_code.device_limits import bandwidth_in_flight, issue_rate
from llmc.codegen.triton.machine_code.figures import KernelCode, kernel_code
from llmc.program import DeviceKernel, Program
from llmc.targets import GpuTarget


@dataclass(frozen=True)
class Finding:
    """One figure of a kernel compared with its limit.

    Attributes:
        limit: The bound and its reason.
        value: The figure; None if the machine code does not show it.
        is_met: Whether it is within the bound.
    """

    limit: Limit
    value: float | None
    is_met: bool

    def seconds(self, code: KernelCode, bytes_moved: float, launches: int = 1) -> float | None:
        """Time that launches lose by the miss, beyond what their bytes take; None if no model says it.

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


@dataclass(frozen=True)
class KernelFindings:
    """One kernel's figures compared with its budget.

    Attributes:
        code: The kernel.
        findings: Its figures, in the budget's order.
    """

    code: KernelCode
    findings: tuple[Finding, ...]


def program_findings(
    engine: Path, program: Program, target: GpuTarget, wanted: Callable[[DeviceKernel], bool] = lambda kernel: True
) -> tuple[KernelFindings, ...]:
    """Check the kernels of a program that have budgets. Each takes a third of a second of one core.

    Args:
        engine: The engine's directory.
        program: The program for the target.
        target: The GPU.
        wanted: Whether to check a kernel.

    Returns:
        In the program's order of kernels.

    Raises:
        ToolchainError: Triton is missing, or its nvdisasm cannot read a cubin.
    """
    known = budgets()

    def check(kernel: DeviceKernel) -> KernelFindings:
        binary, budget = kernel.binaries[target.arch_name], known[kernel.function]
        code = kernel_code(kernel, binary, engine / binary.file, target, budget.streams)
        return KernelFindings(code, check_budget(code, budget))

    checked = [kernel for kernel in program.kernels if kernel.function in known and target.arch_name in kernel.binaries]
    with ThreadPoolExecutor() as threads:
        return tuple(threads.map(check, filter(wanted, checked)))


def check_budget(code: KernelCode, budget: Budget) -> tuple[Finding, ...]:
    """Return each limit of the budget for the kernel's target, with the kernel's figure."""
    findings = []
    for limit in budget.all_limits:
        if limit.is_for(code.target):
            figure = getattr(code, limit.figure)
            value = None if figure is None else float(figure)
            findings.append(Finding(limit, value, value is not None and limit.is_met(value, code.target)))
    return tuple(findings)
