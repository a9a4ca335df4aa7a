"""Figures of an engine's GPU kernels with their budgets, as the report's Kernels page shows them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.engine_format import EngineDirectory


@dataclass(frozen=True)
class BudgetRow:
    """One figure of a kernel.

    Attributes:
        figure: Its name in words.
        value: None if the machine code does not show it.
        bound: The budget in words, such as `≤ 3`.
        is_met: Whether the figure keeps to it.
        reason: Why it must.
    """

    figure: str
    value: float | None
    bound: str
    is_met: bool
    reason: str


# By the kernel's name and the instruction set.
KernelBudgets = dict[str, dict[str, tuple[BudgetRow, ...]]]


def kernel_budgets(directory: "EngineDirectory") -> KernelBudgets:
    """Read the machine code of an engine for NVIDIA's GPUs.

    Returns:
        Kernels that have budgets; empty for an engine without such kernels.

    Raises:
        ToolchainError: Triton, whose disassembler reads the code, is not installed.
    """
    from llmc.targets import gpu_target

    budgets: KernelBudgets = {}
    for compiled in directory.whole_programs if directory.program.kernels else ():
        target = gpu_target(compiled.target)
        if target.backend != "cuda":
            continue
        # Not at the top: it imports all kernels, and so Triton.
        from llmc.codegen.triton.machine_code.findings import program_findings

        for checked in program_findings(directory.path, compiled.program, target):
            budgets.setdefault(checked.code.kernel.name, {})[target.arch_name] = tuple(
                BudgetRow(
                    figure=finding.limit.figure.replace("_", " "),
                    value=finding.value,
                    bound=finding.limit.text(target),
                    is_met=finding.is_met,
                    reason=finding.limit.reason,
                )
                for finding in checked.findings
            )
    return budgets
