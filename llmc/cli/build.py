"""`llmc build`: a model directory in, an engine directory out, with a bar per stage and a table at the end."""

from __future__ import annotations

import gc
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from llmc.cli.cache_text import cache_text
from llmc.cli.completion import complete_targets
from llmc.cli.model_argument import model_argument
from llmc.cli.model_options import ModelOptions
from llmc.cli.parallel_options import ParallelOptions
from llmc.cli.shown_warnings import show_warning
from llmc.cli.stage_bars import StageBars
from llmc.cli.table import Column, FittingTable, facts, numeric, standard_output
from llmc.cli.units import in_bytes, in_rate, in_seconds
from llmc.cli.weight_tables import mean_bits, pruning_table, quantization_table, sparsity_table
from llmc.errors import BuildWarning, OptionError
from llmc.files.hub_model import model_name
from llmc.options import BuildOptions
from llmc.plural import counted
from llmc.program import state_bytes
from llmc.runtime.threads import thread_count
from llmc.targets import resolve_target

if TYPE_CHECKING:
    from llmc.report.build_report import BuildReport

_DEFAULTS = BuildOptions()


def build(
    model: Annotated[Path, model_argument("directory of safetensors, a .gguf or .onnx file, or a name on the hub")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="engine directory to write; default: MODEL-TARGET.llmc in the current directory"
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            help="target (see `llmc targets`); cpu is this machine's CPU, auto its GPU or else its CPU",
            autocompletion=complete_targets,
        ),
    ] = "cpu",
    everything: Annotated[
        bool, typer.Option("--all", help="show every row of tables, instead of folding rows that repeat for each layer")
    ] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="replace an engine without asking")] = False,
    *,
    chosen: ModelOptions,
    plan: ParallelOptions,
    limits: LimitOptions,
) -> None:
    """Compile a model into an engine directory that runs without the model's source."""
    with _collector_paused():
        options = {**chosen.values(), **limits.values()}
        parsed = chosen.parse(**limits.values())
        plan.check(options)
        resolved = resolve_target(target)
        path = output or default_output(model, resolved.name)
        ask_before_replacing(path, force)
        from llmc.frontends.checkpoints.front_ends import CONFIG_ALONE
        from llmc.frontends.open_model import open_model
        from llmc.frontends.transformers.config import check_directory
        from llmc.passes.named_inputs import check_build_inputs

        check_build_inputs(chosen.passes(), parsed)
        opened = open_model(model)
        if opened.front_end is CONFIG_ALONE:  # Other paths that hold no model are reported the same way.
            check_directory(model)
        if output is None:
            Console(stderr=True, highlight=False, soft_wrap=True).print(f"writes {path}", markup=False)
        from llmc.compiler import build as build_engine

        options |= plan.divide(opened, resolved, options, chosen.passes())
        added = chosen.added_passes()
        with StageBars() as shown, warnings.catch_warnings():
            warnings.simplefilter("ignore", BuildWarning)  # They are shown below the tables.
            report = build_engine(model, path, target=target, passes=added, progress=shown, **options)
    _print_report(report, path if output is None else None, everything)


@dataclass(frozen=True)
class LimitOptions:
    """Build options of an engine's steps, and of how far the passes run."""

    max_model_len: Annotated[
        int | None, typer.Option(help="maximum tokens per sequence, prompt and output together")
    ] = None
    max_batch_tokens: Annotated[
        int, typer.Option("--max-batch-tokens", "--max-num-batched-tokens", help="maximum tokens per step")
    ] = _DEFAULTS.max_batch_tokens
    max_sequences: Annotated[
        int | None,
        typer.Option(
            "--max-sequences",
            "--max-num-seqs",
            help=f"maximum requests per step, {_DEFAULTS.max_sequences} unless given",
        ),
    ] = None
    max_logit_rows: Annotated[
        int | None, typer.Option(help="maximum rows of logits per step; a request with drafts needs several")
    ] = None
    block_size: Annotated[int, typer.Option(help="positions in a KV block")] = _DEFAULTS.block_size
    stop_after: Annotated[int | None, typer.Option(help="cut the pipeline after this rewrite number")] = None
    finish_cut: Annotated[
        bool, typer.Option("--finish-cut", help="after a cut, still run the passes that every engine needs")
    ] = False
    check_passes: Annotated[
        bool, typer.Option("--check-passes", help="run the graph before and after each pass, and compare")
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="fail if coverage is incomplete (see `llmc explain`)")] = (
        False
    )

    def values(self) -> dict[str, Any]:
        """The given options by the names of BuildOptions. A default for max_sequences need not fit a GPU, so it is left
        out."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _print_report(report: BuildReport, unnamed: Path | None, everything: bool) -> None:
    """unnamed: the engine's path if the user did not name one."""
    console = standard_output()
    console.print(passes_table(report))
    console.print(kernels_table(report))
    if report.pruned:
        console.print(pruning_table(report.pruned, everything=everything))
    if report.quantized:
        console.print(quantization_table(report.quantized, everything=everything))
    if report.sparse:
        console.print(sparsity_table(report.sparse, everything=everything))
    console.print(summary_table(report))
    for warning in report.warnings:
        show_warning(warning)
    if unnamed is not None:
        console.print(f"run it: llmc run {shlex.quote(str(unnamed))} --prompt …", soft_wrap=True, markup=False)


def default_output(model: Path, target: str) -> Path:
    """A path in the current directory, named after the model and the target."""
    return Path(f"{model_name(model)}-{target.replace(',', '-')}.llmc")


def ask_before_replacing(path: Path, force: bool) -> None:
    """Raise OptionError if an engine exists there and the user does not agree to replace it."""
    from llmc.engine_format.manifest import is_engine

    if force or not is_engine(path):
        return
    if sys.stdin.isatty() and sys.stderr.isatty() and typer.confirm(f"{path} is an engine: replace it?", err=True):
        return
    raise OptionError(
        "an engine already exists at this path", at=path, fix="replace it with --force, or name another: -o"
    )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Disable garbage collection, which would scan the objects of imports and graphs: 0.7 s of 2.4 s of imports, 0.5 s
    of a 6-layer model's build. Weights are in no cycles and are freed as they are written."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def passes_table(report: BuildReport) -> FittingTable:
    """Return a table of each pass that rewrote or refused something."""
    table = FittingTable("passes", (Column("pass"), *numeric("rewrites", "refused", ("nodes", 2), ("time", 1))))
    for record in report.passes:
        if record.rewrites or record.refusals:
            refused = Text(str(len(record.refusals)), style="yellow" if record.refusals else "")
            nodes = f"{record.nodes_before} → {record.nodes_after}"
            table.add_row(record.name, str(len(record.rewrites)), refused, nodes, in_seconds(record.seconds))
    table.add_section()
    total = sum(len(record.rewrites) for record in report.passes)
    table.add_row("all", str(total), "", "", in_seconds(sum(record.seconds for record in report.passes)))
    return table


def kernels_table(report: BuildReport) -> FittingTable:
    """The kernels of a decode step and the number of launches of each."""
    title = f"kernels: {counted(report.kernels.total(), 'launch')} per decode step"
    columns = (Column("kernel"), *numeric("launches"))
    if not report.binaries:
        table = FittingTable(title, columns)
        for name, count in sorted(report.kernels.items()):
            table.add_row(name, str(count))
        return table
    table = FittingTable(title, (*columns, *numeric(("registers", 2), ("spills", 1), ("shared memory", 3))))
    for name, binaries in report.binaries.items():
        built = list(binaries.values())
        registers, spills = max(b.registers for b in built), max(b.spill_bytes for b in built)
        shared = max(b.shared_bytes for b in built)
        spilled = Text(in_bytes(spills), style="yellow") if spills else "0"
        table.add_row(name, str(report.kernels[name] or "other steps"), str(registers), spilled, in_bytes(shared))
    return table


def summary_table(report: BuildReport) -> FittingTable:
    """Sizes, times and the predicted decode step."""
    table = facts(f"{report.path} for {report.target.name}", right=True)
    table.add_row("engine", in_bytes(report.engine_bytes))
    table.add_row("weights", in_bytes(report.weight_bytes))
    # Engines that other runtimes execute, such as onnxruntime, have no launches that llmc could plan or predict.
    if report.unplanned_bytes:
        share = f"{report.arena_bytes / report.unplanned_bytes:.0%} of {in_bytes(report.unplanned_bytes)} unshared"
        table.add_row("arena", f"{in_bytes(report.arena_bytes)} ({share})")
    if report.fitting_sequences is not None:
        table.add_row("sequences of full length that fit", str(report.fitting_sequences))
    if report.quantized:
        table.add_row("bits per quantized weight", f"{mean_bits(report.quantized):.3f}, scales included")
    table.add_row("KV cache", cache_text(report.program))
    if report.program.states:
        table.add_row("states", f"{in_bytes(state_bytes(report.program.states))} per sequence and per snapshot")
    if report.program.launches:
        table.add_row("decode step, predicted", predicted_decode(report))
    for name, seconds in report.seconds.items():
        table.add_row(name, in_seconds(seconds))
    table.add_row("total", in_seconds(sum(report.seconds.values())))
    return table


def predicted_decode(report: BuildReport) -> str:
    """The predicted time of a decode step of one request: for a GPU by its data sheet, including launch overhead, as in
    `llmc inspect`; for a CPU by probes, if the target runs here."""
    from llmc.debug.target_rates import target_rates
    from llmc.prediction.device_step import predict_decode, usual_context
    from llmc.prediction.launch_time import predict_step
    from llmc.prediction.step_shape import StepShape

    if report.target.compiled:
        prediction = predict_decode(report.program, report.target.compiled[0], 1, usual_context(report.program.limits))
        rate = in_rate(report.target.compiled[0].bandwidth)
        moved = f"{in_bytes(prediction.bytes_moved)}, {prediction.bandwidth_share:.0%} of {rate}"
        return f"{in_seconds(prediction.seconds)} ({counted(prediction.launches, 'launch')}; {moved})"
    moved, step = in_bytes(report.decode_bytes), StepShape.decode(requests=1, context=1)
    rates = target_rates(report.target, report.program, thread_count(None))
    if rates is None:
        return f"{moved} moved; not predicted, since {report.target.name} does not run here"
    return f"{in_seconds(predict_step(report.program, step, rates))} ({moved} at {in_rate(rates.bandwidth)})"
