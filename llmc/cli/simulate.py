"""`llmc simulate`: estimate the hardware that a load needs."""

from __future__ import annotations

from collections.abc import Sequence
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
from llmc.cli.status_line import status_line
from llmc.cli.table import standard_output
from llmc.errors import OptionError
from llmc.files.hub_model import model_name
from llmc.options import BuildOptions
from llmc.plural import counted
from llmc.runtime.threads import thread_count
from llmc.targets import resolve_target

if TYPE_CHECKING:
    from llmc.simulation.load import Arrival
    from llmc.simulation.pricing import Machine
    from llmc.simulation.rent import Rent

_DEFAULTS = BuildOptions()


def simulate(
    model: Annotated[Path, model_argument("model directory (config.json is enough) or engine", weights=False)],
    *,
    machine: MachineOptions,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="file of requests: JSON lines of arrival, prompt_tokens, output_tokens, or bench serve --json"
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="number of requests to draw without a trace", min=1)] = 200,
    request_rate: Annotated[float | None, typer.Option(help="requests per second; default: all at once")] = None,
    shape: ShapeOptions,
    seed: Annotated[int, typer.Option(help="seed of lengths and arrivals")] = 0,
    goodput: Annotated[list[str] | None, typer.Option(help="a goal such as ttft:200, in ms (repeatable)")] = None,
    chosen: ModelOptions,
    max_model_len: Annotated[int | None, typer.Option(help="maximum tokens per sequence; default: the load's")] = None,
    max_batch_tokens: Annotated[
        int, typer.Option("--max-batch-tokens", "--max-num-batched-tokens", help="maximum tokens per step")
    ] = _DEFAULTS.max_batch_tokens,
    max_sequences: Annotated[
        int, typer.Option("--max-sequences", "--max-num-seqs", help="maximum requests per step")
    ] = _DEFAULTS.max_sequences,
    json_file: Annotated[Path | None, typer.Option("--json", help="file for the figures, as JSON")] = None,
    plot: Annotated[Path | None, typer.Option(help="file for a plot (.png, .svg)")] = None,
) -> None:
    """Simulate serving a load for each way to divide the ranks; or compare targets, as in --target a100,h100."""
    from llmc.bench.summary import parse_goals
    from llmc.cli.simulation_table import comparison_json, print_comparison
    from llmc.simulation.compare import best_or_refuse
    from llmc.simulation.load import drawn_load, longest, read_trace
    from llmc.simulation.plot import plot_comparison

    goals, targets, prices = parse_goals(goodput or []), machine.targets(), machine.prices()
    check_output(json_file, plot)
    check_plot(plot, targets)
    load = drawn_load(shape, num_prompts, request_rate, seed) if trace is None else read_trace(trace)
    limits = {
        "max_model_len": longest(load) if max_model_len is None else max_model_len,
        "max_batch_tokens": max_batch_tokens,
        "max_sequences": max_sequences,
    }
    machines = {name: machine.machine(name) for name in targets}
    rents, console = _rents(model, chosen, limits, machines, load, goals), standard_output()
    about: dict[str, Any] = {"model": str(model), "ranks": machine.ranks}
    title = f"{model_name(model)}: {counted(len(load), 'request')}"
    if len(targets) > 1 or prices:
        write_figures(json_file, about | print_ranking(console, rents, machine, prices, title, goals))
        return
    ((name, rented),) = machines.items()
    with status_line("simulating"):
        comparison = rents[name](machine.ranks)
    title = f"{title} on {machine.ranks} × {rented.target.name}"
    print_comparison(console, comparison, title)
    write_figures(json_file, about | {"target": rented.target.name} | comparison_json(comparison))
    best = best_or_refuse(comparison, rented)
    if plot is not None:
        plot_comparison(comparison, plot, title)
    console.print(f"best: {best.division}; predicted and not measured", highlight=False)


def check_plot(plot: Path | None, targets: Sequence[str]) -> None:
    """Raise OptionError for a plot of several targets, and ToolchainError if matplotlib is not installed."""
    from llmc.bench.plot import require_plot_extra

    if plot is not None:
        require_plot_extra()
        if len(targets) > 1:
            raise OptionError("a plot shows one target only", at=f"--plot {plot}", fix="name one, or leave out --plot")


def print_ranking(
    console: Console,
    rents: dict[str, Rent],
    machine: MachineOptions,
    prices: dict[str, float],
    title: str,
    goals: dict[str, float],
) -> dict[str, Any]:
    """Print the smallest fleet of each target, and return it as plain data. Raises OptionError if none serves."""
    from llmc.cli.simulation_table import fleets_json, print_fleets
    from llmc.simulation.fleets import Fleet, smallest_fleet

    with status_line("simulating"):
        fleets = [smallest_fleet(name, rent, machine.ranks, prices.get(name)) for name, rent in rents.items()]
    print_fleets(console, fleets, title, goals)
    if not any(isinstance(fleet, Fleet) for fleet in fleets):
        raise OptionError(
            f"no target serves this with {counted(machine.ranks, 'rank')} or fewer",
            at=f"--target {machine.target}",
            fix="take more --ranks, quantize the weights (--quantize int4), or lower --max-model-len",
        )
    return fleets_json(fleets)


def _rents(
    model: Path,
    chosen: ModelOptions,
    limits: dict[str, Any],
    machines: dict[str, Machine],
    load: tuple[Arrival, ...],
    goals: dict[str, float],
) -> dict[str, Rent]:
    """Compare numbers of ranks per target, for a model that is captured once."""
    from llmc.engine_format.manifest import MANIFEST_NAME
    from llmc.simulation.rent import rent_for_engine, rent_for_model

    if (model / MANIFEST_NAME).exists():
        chosen.refuse_for_engine()
        return {name: rent_for_engine(model, machine, load, goals) for name, machine in machines.items()}
    with status_line("capturing") as tell:
        from llmc.frontends.capture import capture

        options, passes = chosen.parse(**limits), chosen.passes()
        captured = capture(model, options, may_lack_weights=True)
        return {
            name: rent_for_model(captured, passes, options, machine, load, goals, tell)
            for name, machine in machines.items()
        }


@dataclass(frozen=True)
class MachineOptions:
    """A number of ranks of one or several targets, and the link between them."""

    target: Annotated[
        str,
        Option(
            help="target of each rank (see `llmc targets`); several, separated by commas, are compared",
            autocompletion=complete_targets,
        ),
    ] = "h100"
    ranks: Annotated[int, Option(help="number of ranks; with several targets, the maximum to try")] = 8
    price: Annotated[
        list[str] | None, Option(help="price of a rank per hour, such as h100=2.5 (repeatable)", metavar="TARGET=PRICE")
    ] = None
    memory: Annotated[float | None, Option(help="memory of a rank in GB; default: the target's")] = None
    link: Annotated[str | None, Option(help="link between ranks, such as pcie-4; default: the target's")] = None
    disable_custom_all_reduce: Annotated[
        bool, Option("--disable-custom-all-reduce", help="use only the library's collectives")
    ] = False
    threads: Annotated[int | None, Option(help="threads of a CPU, for all ranks; default: all cores")] = None

    rates: Annotated[
        Path | None, Option(help="file with the measured rates of this CPU; measured and written if it does not exist")
    ] = None

    def targets(self) -> list[str]:
        """Return the names of the targets."""
        return list(dict.fromkeys(name.strip() for name in self.target.split(",")))

    def prices(self) -> dict[str, float]:
        """The price per hour of each target's rank. Raises OptionError."""
        from llmc.simulation.fleets import parse_prices

        return parse_prices(self.price or (), self.targets())

    def machine(self, target: str) -> Machine:
        """Ranks of the target of that name. Raises TargetError, OptionError."""
        from llmc.simulation.rent import machine_of

        return machine_of(
            resolve_target(target),
            self.ranks,
            memory_bytes=None if self.memory is None else int(self.memory * 1e9),
            threads=thread_count(self.threads),
            custom=not self.disable_custom_all_reduce,
            link=self.link,
            recorded=self.rates,
        )
