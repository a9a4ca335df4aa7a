"""How many ranks a build may take, as options: the simulator divides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Option

from llmc.cli.shape_options import ShapeOptions
from llmc.cli.table import standard_output
from llmc.errors import OptionError
from llmc.options import parse_options
from llmc.targets import Target

if TYPE_CHECKING:
    from llmc.passes.rewrite import Pass

_REQUESTS = 200


@dataclass(frozen=True)
class ParallelOptions:
    """Ranks that a plan is chosen for."""

    parallel: Annotated[
        str | None, Option(help="auto: divide --ranks as `llmc simulate` finds best", metavar="auto")
    ] = None
    ranks: Annotated[int | None, Option(help="how many there are, for --parallel auto", min=1)] = None
    memory: Annotated[float | None, Option(help="GB of one rank, for --parallel auto; default: the target's")] = None
    trace: Annotated[
        Path | None, Option(help=f"the load, as simulate takes it; default: {_REQUESTS} requests at once")
    ] = None

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise OptionError for what does not go together."""
        if self.parallel not in (None, "auto"):
            raise OptionError(f"there is no plan {self.parallel!r}", at="--parallel", fix="say --parallel auto")
        if self.parallel is None:
            given = [name for name in ("ranks", "memory", "trace") if getattr(self, name) is not None]
            if given:
                raise OptionError(
                    f"--{given[0]} is for plans that are chosen", at=f"--{given[0]}", fix="add --parallel auto"
                )
        elif self.ranks is None:
            raise OptionError("a plan is chosen for a number of ranks", at="--parallel auto", fix="add --ranks 8")
        elif options["tensor_parallel_size"] > 1 or options["pipeline_parallel_size"] > 1:
            raise OptionError(
                "the ranks are divided already",
                at="--parallel auto",
                fix="leave out --tensor-parallel-size and --pipeline-parallel-size, or --parallel",
            )

    def divide(self, model: Path, target: Target, options: Mapping[str, Any], passes: Sequence[Pass]) -> dict[str, int]:
        """The sizes of the best division, which is shown beside the others; nothing without --parallel.

        Raises OptionError where none can serve the load, with what would.
        """
        if self.parallel is None or self.ranks is None:
            return {}
        from llmc.cli.simulation_table import comparison_table, refusals_table
        from llmc.graph.capture import capture
        from llmc.simulation.compare import best_or_refuse
        from llmc.simulation.load import drawn_load, longest, read_trace
        from llmc.simulation.rent import machine_of, rent_for_model

        load = drawn_load(ShapeOptions(), _REQUESTS, None, 0) if self.trace is None else read_trace(self.trace)
        machine = machine_of(target, self.ranks, memory_bytes=None if self.memory is None else int(self.memory * 1e9))
        asked = parse_options({**options, "max_model_len": options["max_model_len"] or longest(load)})
        with Console(stderr=True).status("capturing") as status:
            captured = capture(model, asked, may_lack_weights=True)
            comparison = rent_for_model(captured, passes, asked, machine, self.ranks, load, {}, status.update)
        console = standard_output()
        console.print(comparison_table(comparison, f"{self.ranks} × {target.name}: {len(load)} requests, predicted"))
        refusals = refusals_table(comparison)
        if refusals is not None:
            console.print(refusals)
        best = best_or_refuse(comparison, machine).division
        console.print(f"builds {best}", highlight=False)
        return {
            "tensor_parallel_size": best.layout.tensor,
            "pipeline_parallel_size": best.layout.pipeline,
        }
