"""`llmc profile`: the time of every kernel in real steps, and the prediction of the cost model."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.cli.output_file import check_output, write_output
from llmc.cli.status_line import status_line
from llmc.cli.table import Column, FittingTable, numeric, standard_output
from llmc.cli.units import in_bytes, in_seconds
from llmc.plural import counted

if TYPE_CHECKING:
    from llmc.prediction.rates import KindRates
    from llmc.program import Launch
    from llmc.report.profile import StepProfile


def profile(
    engine: Annotated[Path, typer.Argument(help="engine directory")],
    prefill: Annotated[
        int | None, typer.Option(help="tokens of the prompt; default: 512, or the engine's limit if lower")
    ] = None,
    batch: Annotated[int, typer.Option(help="requests in the decode step")] = 1,
    context: Annotated[
        int | None, typer.Option(help="cached tokens of each request; default: 128, or the engine's limit if lower")
    ] = None,
    repeats: Annotated[int, typer.Option(help="measured steps of each kind")] = 9,
    threads: Annotated[int | None, typer.Option(help="threads of a CPU engine; default: one per core")] = None,
    trace: Annotated[Path | None, typer.Option(help="file for a Chrome trace, for ui.perfetto.dev")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="file for the figures, for `llmc report --profile`")
    ] = None,
) -> None:
    """Measure the time of each kernel in a real prefill and decode step, and compare with the cost model."""
    from llmc.debug.chrome_trace import chrome_trace
    from llmc.debug.profiler import Workload, profile_engine
    from llmc.engine_format import read_engine
    from llmc.files.typed_json import to_json

    check_output(trace, json_file)
    program = read_engine(engine, check_weights=False).program
    longest = min(program.limits.max_batch_tokens, program.limits.max_model_len)
    workload = Workload(
        prefill=min(512, longest) if prefill is None else prefill,
        batch=batch,
        context=min(128, program.limits.max_model_len - 1) if context is None else context,
        repeats=repeats,
    )
    with status_line("measuring") as tell:
        result = profile_engine(engine, workload, threads, lambda line: tell(line))
    console = standard_output()
    for step in result.steps:
        console.print(step_table(step, program.launches))
    if trace is not None:
        write_json(trace, chrome_trace(result, program.launches))
        console.print(f"trace: {trace}, open it in https://ui.perfetto.dev", highlight=False, soft_wrap=True)
    if json_file is not None:
        write_json(json_file, to_json(result))
        console.print(f"profile: {json_file}, see llmc report {engine} --profile {json_file}", soft_wrap=True)


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON. Raises OptionError if it cannot be written."""
    write_output(path, json.dumps(content, ensure_ascii=False) + "\n")


@dataclass
class _Total:
    launches: int = 0
    measured: float = 0.0
    predicted: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0

    def cells(self, whole: float) -> tuple[str, ...]:
        ratio = f"{self.measured / self.predicted:.2f}" if self.predicted else ""
        return (
            str(self.launches),
            in_seconds(self.measured),
            f"{self.measured / whole:.1%}",
            in_seconds(self.predicted),
            ratio,
            f"{self.bytes / self.measured / 1e9:.1f}",
            f"{self.flops / self.measured / 1e9:.0f}",
        )


def step_table(step: StepProfile, launches: tuple[Launch, ...]) -> FittingTable:
    """Kernels of a step, the one that takes longest first."""
    from llmc.prediction.cost_expression import evaluate_expression
    from llmc.report.profile import kernel_class

    totals: defaultdict[str, _Total] = defaultdict(_Total)
    values, overall = step.shape.values(), _Total()
    for timing in step.launches:
        launch = launches[timing.launch]
        moved, flops = (evaluate_expression(text, values) for text in (launch.bytes_moved, launch.flops))
        for total in (totals[kernel_class(launch)], overall):
            total.launches += 1
            total.measured += timing.seconds
            total.predicted += timing.predicted
            total.bytes += moved
            total.flops += flops
    title = f"{step.name}: {in_seconds(step.seconds)} measured (±{step.spread / 2:.0%}, median of {step.repeats})"
    figures = numeric(("n", 4), "measured", ("share", 3), ("predicted", 1), ("ratio", 2), ("GB/s", 5), ("GFLOP/s", 6))
    table = FittingTable(title, (Column("kernel"), *figures), caption=machine_line(step))
    for name, total in sorted(totals.items(), key=lambda item: -item[1].measured):
        table.add_row(name, *total.cells(overall.measured))
    table.add_section()
    table.add_row("all", *overall.cells(overall.measured))
    return table


def machine_line(step: StepProfile) -> str:
    """The assumptions of the prediction."""
    rates = step.rates
    kinds = "; ".join(_kind_line(name, kind) for name, kind in rates.kinds.items())
    source = "measured just before" if rates.measured else "data sheet"
    return f"predicted from {in_bytes(rates.bandwidth)}/s, {kinds}: {source}"


def _kind_line(name: str, kind: KindRates) -> str:
    few = f", {kind.reach[0].share:.0%} of that for {counted(kind.reach[0].rows, 'row')}" if kind.reach else ""
    serial = "" if kind.serial == 0 else f", {kind.serial:.0%} of the shorter of compute and transfer not overlapped"
    apart = "" if kind.bandwidth is None else f", {in_bytes(kind.bandwidth)}/s"
    return f"{name} {kind.multiply / 1e9:.0f} GFLOP/s{few}{serial}{apart}"
