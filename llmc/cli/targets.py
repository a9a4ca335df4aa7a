"""`llmc targets`: what can be built for, and what this machine can run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from llmc.targets import CpuTarget, host_target, known_targets, missing_features


def targets() -> None:
    """List the targets that an engine can be built for."""
    here = host_target()
    table = Table(title=f"targets (cpu means {here.name} on this machine)", title_justify="left")
    table.add_column("target", style="bold")
    table.add_column("what it is")
    table.add_column("runs here")
    for target in known_targets():
        missing = missing_features(target) if isinstance(target, CpuTarget) else ()
        table.add_row(target.name, target.summary, "yes" if not missing else "no: lacks " + ", ".join(missing))
    Console().print(table)
