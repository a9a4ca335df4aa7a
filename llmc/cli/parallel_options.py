"""Options for the number of ranks of a build, which the simulator then divides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from llmc.cli.status_line import status_line
from llmc.cli.table import standard_output
from llmc.plural import counted
from llmc.simulation.choose_division import REQUESTS, DivisionWish, consider_divisions
from llmc.targets import Target

if TYPE_CHECKING:
    from llmc.frontends.front_end import OpenedModel
    from llmc.passes.rewrite import Pass


@dataclass(frozen=True)
class ParallelOptions(DivisionWish):
    """The options as given on the command line."""

    parallel: Annotated[
        str | None, Option(help="auto: divide --ranks as `llmc simulate` finds best", metavar="auto")
    ] = None
    ranks: Annotated[int | None, Option(help="number of ranks, for --parallel auto", min=1)] = None
    memory: Annotated[
        float | None, Option(help="memory of a rank in GB, for --parallel auto; default: the target's")
    ] = None
    trace: Annotated[
        Path | None, Option(help=f"the load, as simulate takes it; default: {REQUESTS} requests at once")
    ] = None

    def divide(
        self, model: Path | OpenedModel[Any], target: Target, options: Mapping[str, Any], passes: Sequence[Pass]
    ) -> dict[str, int]:
        """The sizes of the best division, which is printed in a table of all; empty without --parallel.

        Raises OptionError if no division can serve the load; the error names one that could.
        """
        if self.parallel is None:
            return {}
        from llmc.cli.simulation_table import print_comparison

        with status_line("capturing") as tell:
            considered = consider_divisions(model, target, self, options, passes, tell)
        console = standard_output()
        title = f"{self.ranks} × {target.name}: {counted(considered.requests, 'request')}, predicted"
        print_comparison(console, considered.comparison, title)
        console.print(f"builds {considered.best}", highlight=False)
        return considered.sizes()
