"""`llmc tune`: measure an engine's kernels on this machine's GPU and keep the fastest variants."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from llmc.cli.table import Column, FittingTable, numeric, standard_output
from llmc.cli.units import in_seconds

if TYPE_CHECKING:
    from llmc.tuning.choice import Tuned


def tune(
    engine: Annotated[Path, typer.Argument(help="engine directory, built for a GPU")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="path of the tuned engine; default: in place")
    ] = None,
) -> None:
    """Measure kernels and their variants on this GPU, and record the fastest in the engine."""
    from llmc.tuning.tune import tune as tune_engine

    console = Console(stderr=True)
    results = tune_engine(engine, engine if output is None else output, lambda line: console.print(line, markup=False))
    standard_output().print(tuned_table(results))


def tuned_table(results: tuple[Tuned, ...]) -> FittingTable:
    """Time before and after, one kernel per row."""
    figures = numeric(("before", 3), ("after", 2), ("gain", 1), ("warps", 4), ("stages", 5))
    table = FittingTable("kernels, seconds per launch", (Column("kernel"), Column("chosen", rank=2), *figures))
    for r in results:
        gain = f"{r.before / r.after:.2f}x" if r.after < r.before else ""
        chosen = "" if r.what == r.kernel else r.what
        table.add_row(
            r.kernel, chosen, in_seconds(r.before), in_seconds(r.after), gain, str(r.num_warps), str(r.num_stages)
        )
    return table
