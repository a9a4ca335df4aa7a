"""`llmc export`: the graph of a stage as ONNX, with its weights, for onnxruntime and Netron."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmc.cli.model_argument import model_argument
from llmc.cli.model_options import ModelOptions
from llmc.cli.stage_bars import StageBars
from llmc.cli.table import FittingTable, facts, standard_output
from llmc.cli.units import in_bytes, in_seconds
from llmc.errors import OptionError
from llmc.files.hub_model import model_name

if TYPE_CHECKING:
    from llmc.exporter import ExportReport


def export(
    model: Annotated[Path, model_argument("model directory, a .gguf or .onnx file, a name on the hub, or an engine")],
    stage: Annotated[
        str | None,
        typer.Option(help="stage of the graph: captured, canonical, serving or optimized; default: optimized"),
    ] = None,
    flavour: Annotated[
        Literal["standard", "genai"],
        typer.Option(help="standard: only standard ops; genai: the form of onnxruntime-genai"),
    ] = "standard",
    against: Annotated[
        Path | None,
        typer.Option(help="if MODEL is an engine: the model that it was built from"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="directory to write; default: MODEL-STAGE.onnx in the current directory"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="replace an earlier export")] = False,
    *,
    chosen: ModelOptions,
) -> None:
    """Write the graph of a stage as an ONNX model for onnxruntime: model.onnx, weights, tokenizer and config."""
    from llmc.exporter import export as export_model

    path = output or Path(f"{model_name(model)}-{stage or flavour}.onnx")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise OptionError("the output path already exists", at=path, fix="replace it with --force, or name another: -o")
    with StageBars() as shown, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="onnx")
        report = export_model(
            model,
            path,
            stage=stage,
            flavour=flavour,
            against=against,
            passes=chosen.added_passes(),
            progress=shown,
            **chosen.values(),
        )
    standard_output().print(summary_table(report))


def summary_table(report: ExportReport) -> FittingTable:
    """The written files and the time taken."""
    table = facts(f"{report.path}, stage {report.stage}", right=True)
    table.add_row("model.onnx", in_bytes(report.model_bytes))
    table.add_row("weights", in_bytes(report.weight_bytes))
    table.add_row("nodes", f"{report.nodes} of {report.functions} functions")
    for name, seconds in report.seconds.items():
        table.add_row(name, in_seconds(seconds))
    table.add_row("total", in_seconds(sum(report.seconds.values())))
    return table
