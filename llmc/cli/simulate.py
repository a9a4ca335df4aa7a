"""`llmc simulate`: what to rent, before anything is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

from llmc.cli.completion import complete_targets
from llmc.cli.model_argument import model_argument
from llmc.cli.model_options import ModelOptions
from llmc.cli.output_file import check_output, write_figures
from llmc.cli.shape_options import ShapeOptions
from llmc.cli.table import standard_output
from llmc.files.hub_model import model_name
from llmc.options import BuildOptions, parse_options
from llmc.runtime.threads import thread_count
from llmc.targets import resolve_target

if TYPE_CHECKING:
    from llmc.simulation.compare import Comparison
    from llmc.simulation.load import Arrival
    from llmc.simulation.pricing import Machine

_DEFAULTS = BuildOptions()


def simulate(
    model: Annotated[
        Path, model_argument("model directory, of which config.json is enough, or an engine", weights=False)
    ],
    *,
    machine: MachineOptions,
    trace: Annotated[
        Path | None,
        typer.Option(help="requests: lines of JSON with arrival, prompt_tokens, output_tokens, or bench serve --json"),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="requests that are drawn without a trace", min=1)] = 200,
    request_rate: Annotated[float | None, typer.Option(help="their number a second; default: all at once")] = None,
    shape: ShapeOptions,
    seed: Annotated[int, typer.Option(help="of lengths and arrivals")] = 0,
    goodput: Annotated[list[str] | None, typer.Option(help="a goal such as ttft:200, in ms (repeatable)")] = None,
    chosen: ModelOptions,
    max_model_len: Annotated[int | None, typer.Option(help="longest sequence; default: that of the load")] = None,
    max_batch_tokens: Annotated[int, typer.Option(help="tokens a step")] = _DEFAULTS.max_batch_tokens,
    max_sequences: Annotated[int, typer.Option(help="requests a step")] = _DEFAULTS.max_sequences,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
    plot: Annotated[Path | None, typer.Option(help="write a picture here (.png, .svg)")] = None,
) -> None:
    """Serve a load on a virtual clock, for each way to divide the ranks into tensor ranks, stages and replicas."""
    from llmc.bench.plot import require_plot_extra
    from llmc.bench.summary import parse_goals
    from llmc.cli.simulation_table import comparison_json, print_comparison
    from llmc.simulation.compare import best_or_refuse
    from llmc.simulation.load import drawn_load, longest, read_trace
    from llmc.simulation.plot import plot_comparison

    goals = parse_goals(goodput or [])
    check_output(json_file, plot)
    if plot is not None:
        require_plot_extra()
    load = drawn_load(shape, num_prompts, request_rate, seed) if trace is None else read_trace(trace)
    ranks, rented = machine.ranks, machine.machine()
    limits = {
        "max_model_len": longest(load) if max_model_len is None else max_model_len,
        "max_batch_tokens": max_batch_tokens,
        "max_sequences": max_sequences,
    }
    comparison = _compared(model, chosen, limits, rented, ranks, load, goals)
    title = f"{model_name(model)} on {ranks} × {rented.target.name}: {len(load)} requests"
    console = standard_output()
    print_comparison(console, comparison, title)
    about = {"model": str(model), "target": rented.target.name, "ranks": ranks}
    write_figures(json_file, about | comparison_json(comparison))
    best = best_or_refuse(comparison, rented)
    if plot is not None:
        plot_comparison(comparison, plot, title)
    console.print(f"best: {best.division}; predicted and not measured", highlight=False)


def _compared(
    model: Path,
    chosen: ModelOptions,
    limits: dict[str, Any],
    machine: Machine,
    ranks: int,
    load: tuple[Arrival, ...],
    goals: dict[str, float],
) -> Comparison:
    from llmc.engine_format.manifest import MANIFEST_NAME
    from llmc.simulation.rent import rent_for_engine, rent_for_model

    if (model / MANIFEST_NAME).exists():
        chosen.refuse_for_engine()
        return rent_for_engine(model, machine, ranks, load, goals)
    with Console(stderr=True).status("capturing") as status:
        from llmc.frontends.capture import capture

        options, passes = parse_options({**chosen.values(), **limits}), chosen.passes()
        captured = capture(model, options, may_lack_weights=True)
        return rent_for_model(captured, passes, options, machine, ranks, load, goals, status.update)


@dataclass(frozen=True)
class MachineOptions:
    """A number of ranks of a target, and what joins them."""

    target: Annotated[str, Option(help="what each rank is: see `llmc targets`", autocompletion=complete_targets)] = (
        "h100"
    )
    ranks: Annotated[int, Option(help="how many of them")] = 8
    memory: Annotated[float | None, Option(help="GB of one rank; default: the target's")] = None
    link: Annotated[str | None, Option(help="what joins ranks, such as pcie-4; default: the target's")] = None
    disable_custom_all_reduce: Annotated[
        bool, Option("--disable-custom-all-reduce", help="collectives of a library only")
    ] = False
    threads: Annotated[int | None, Option(help="of a CPU, for all ranks; default: every core")] = None

    rates: Annotated[
        Path | None, Option(help="how fast this CPU is: read from this file, or measured and written there")
    ] = None

    def machine(self) -> Machine:
        """Raises TargetError, OptionError."""
        from llmc.simulation.rent import machine_of

        return machine_of(
            resolve_target(self.target),
            self.ranks,
            memory_bytes=None if self.memory is None else int(self.memory * 1e9),
            threads=thread_count(self.threads),
            custom=not self.disable_custom_all_reduce,
            link=self.link,
            recorded=self.rates,
        )
