"""`llmc report`: the page of an engine, with this machine's rates and, if there is one, a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.output_file import check_output, write_output
from llmc.cli.status_line import status_line
from llmc.cli.table import standard_output
from llmc.cli.units import in_bytes
from llmc.errors import ToolchainError
from llmc.targets import cpu_target_here

if TYPE_CHECKING:
    from llmc.engine_format import EngineDirectory
    from llmc.prediction.rates import Rates
    from llmc.report.machine_code import KernelBudgets


def report(
    engine: Annotated[Path, typer.Argument(help="engine directory")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="path of the page; default: ENGINE-report.html")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="output of llmc profile --json: adds measured times to the predictions")
    ] = None,
    perplexity: Annotated[
        Path | None, typer.Option(help="output of llmc verify --perplexity TEXT --json: adds quality to the sizes")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="threads of the predicted steps; default: one per core")] = None,
) -> None:
    """Write one HTML file that shows passes, graphs, kernels, rooflines, memory and quantization of an engine."""
    from llmc.engine_format import read_engine
    from llmc.report.contents import read_contents
    from llmc.report.measured_perplexity import read_perplexity
    from llmc.report.page.page import report_page
    from llmc.report.profile import check_profile, read_profile

    path = engine.with_name(f"{engine.name.removesuffix('.llmc')}-report.html") if output is None else output
    check_output(path)
    directory = read_engine(engine, check_weights=False, check_machine=False)
    measured = None if profile is None else read_profile(profile)
    if measured is not None and profile is not None:
        check_profile(measured, directory, profile)
    quality = None if perplexity is None else read_perplexity(perplexity, directory)
    rates = machine_rates(directory, threads)
    contents = read_contents(directory.files, directory.manifest, *directory.stage_programs)
    page = report_page(contents, rates, measured, quality, machine_code(directory))
    write_output(path, page)
    standard_output().print(f"{path} ({in_bytes(len(page.encode()))}): open it in a browser", soft_wrap=True)


def machine_code(directory: EngineDirectory) -> KernelBudgets | None:
    """Figures of the kernels of an NVIDIA GPU's engine; None if Triton, which reads them, is not installed."""
    from llmc.report.machine_code import kernel_budgets

    try:
        with status_line("reading machine code"):
            return kernel_budgets(directory)
    except (ToolchainError, ModuleNotFoundError):
        return None


def machine_rates(directory: EngineDirectory, threads: int | None) -> Rates | None:
    """The machine's rates for a CPU engine that runs here; None for other engines, whose page states its
    assumptions."""
    from llmc.codegen.cpp.measured_rates import measured_rates  # needs no torch, as the kinds of targets do
    from llmc.runtime.threads import thread_count

    target = cpu_target_here(directory.manifest.target.name)
    if target is None:
        return None
    try:
        with status_line("measuring this machine"):
            return measured_rates(target, thread_count(threads), directory.program)
    except ToolchainError:
        return None  # The probes need a compiler; the rest of the page does not.
