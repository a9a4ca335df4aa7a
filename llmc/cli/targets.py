"""`llmc targets`: the targets of builds, and whether this machine runs them."""

from llmc.cli.table import Column, FittingTable, standard_output
from llmc.targets import device_target, host_target, known_targets, lacking_here


def targets() -> None:
    """List the targets that an engine can be built for."""
    host, device = host_target(), device_target()
    columns = (
        Column("target", style="bold"),
        Column("what it is", rank=1, wraps=True),
        Column("runs here", wraps=True),
    )
    table = FittingTable(f"targets (cpu means {host.name} on this machine)", columns)
    for target in known_targets():
        lacking = lacking_here(target, device)
        table.add_row(target.name, target.summary, "yes" if lacking is None else f"no: {lacking}")
    standard_output().print(table)
