"""`llmc targets`: what can be built for, and what this machine can run."""

from __future__ import annotations

from llmc.cli.table import Column, FittingTable, standard_output
from llmc.targets import CpuTarget, GpuTarget, device_target, host_target, known_targets, missing_features


def targets() -> None:
    """List the targets that an engine can be built for."""
    here, device = host_target(), device_target()
    columns = (
        Column("target", style="bold"),
        Column("what it is", rank=1, wraps=True),
        Column("runs here", wraps=True),
    )
    table = FittingTable(f"targets (cpu means {here.name} on this machine)", columns)
    for target in known_targets():
        missing = missing_features(target) if isinstance(target, CpuTarget) else ()
        runs = "yes" if not missing else "no: lacks " + ", ".join(missing)
        if isinstance(target, GpuTarget):
            runs = "yes" if device is not None and device.arch_name == target.arch_name else "no: builds only"
        table.add_row(target.name, target.summary, runs)
    standard_output().print(table)
