"""The output of `llmc inspect --sass`: figures of GPU kernels' machine code with their budgets."""

from pathlib import Path

from llmc.cli.table import Column, FittingTable, numeric
from llmc.cli.units import in_seconds
from llmc.codegen.triton.machine_code.findings import program_findings
from llmc.prediction.device_step import StepPrediction
from llmc.program import Program
from llmc.targets import GpuTarget


def machine_code_table(
    engine: Path, program: Program, target: GpuTarget, step: StepPrediction, *, everything: bool
) -> FittingTable:
    """Return a table of the figures that miss their budgets, for the kernels that a step launches.

    Args:
        engine: The engine's directory.
        program: The program for the target.
        target: The GPU.
        step: Prediction of a step of the program, used for the cost of a missed limit.
        everything: Whether to show kernels of other steps and figures that keep to their budgets as well.

    Returns:
        The table. `costs` is the time that the step loses by the miss, predicted.
    """
    columns = (
        Column("kernel"),
        Column("figure"),
        *numeric("value", "budget", ("costs", 1)),
        Column("why", rank=2, wraps=True),
    )
    table = FittingTable("", columns)
    figures = missed = 0
    checked = program_findings(
        engine, program, target, lambda kernel: everything or step.kernel_launches.get(kernel.name, 0) > 0
    )
    for checked_kernel in checked:
        kernel, findings = checked_kernel.code.kernel, checked_kernel.findings
        launches = step.kernel_launches.get(kernel.name, 0)
        shown = [finding for finding in findings if everything or not finding.is_met]
        figures += len(findings)
        missed += sum(not finding.is_met for finding in findings)
        for number, finding in enumerate(shown):
            seconds = finding.seconds(checked_kernel.code, step.kernel_bytes.get(kernel.name, 0.0), launches)
            table.add_row(
                kernel.name if number == 0 else "",
                finding.limit.figure.replace("_", " "),
                "not visible" if finding.value is None else f"{finding.value:,.4g}",
                finding.limit.text(target),
                in_seconds(seconds) if seconds is not None and launches else "",
                "" if finding.is_met else finding.limit.reason,
                style="" if finding.is_met or not everything else "bold",
            )
        if shown:
            table.add_section()
    table.title = (
        f"machine code for {target.arch_name}: {missed} of {figures} figures of {len(checked)} kernels miss budgets"
    )
    table.caption = f"costs: in a {step.step}, predicted" + ("" if everything else "; --all: every kernel and figure")
    return table
