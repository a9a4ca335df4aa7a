"""`llmc viz`: the graph of one stage of a model or an engine, for Graphviz, Mermaid or a program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.model_argument import model_argument
from llmc.cli.model_options import ModelOptions
from llmc.cli.output_file import check_output, write_output
from llmc.cli.status_line import status_line
from llmc.cli.target_option import DEFAULT_TARGET, TargetOption, tokens_for
from llmc.errors import OptionError

if TYPE_CHECKING:
    from llmc.debug.viz.stage_graph import StageGraph

FORMATS = ("svg", "dot", "mermaid", "json")


def viz(
    source: Annotated[Path, model_argument("model directory, or an engine")],
    stage: Annotated[
        str, typer.Option(help="stage of the graph: captured, canonical, serving or optimized")
    ] = "optimized",
    form: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))] = "svg",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; default: standard output")
    ] = None,
    every_layer: Annotated[
        bool, typer.Option("--every-layer", help="in pictures, draw every layer instead of identical ones once")
    ] = False,
    *,
    target: TargetOption = DEFAULT_TARGET,
    options: ModelOptions,
) -> None:
    """Write the graph of one stage. Pictures omit weights and show identical layers once."""
    if form not in FORMATS:
        fix = f"formats: {', '.join(FORMATS)}; `llmc export MODEL --stage {stage}` writes ONNX"
        raise OptionError(f"{form!r} is not a format", at=f"--format={form}", fix=fix)
    check_output(output)
    from llmc.debug.viz.stage_graph import stage_graph
    from llmc.engine_format.manifest import MANIFEST_NAME

    parsed = options.parse()
    with status_line("reading the graph"):
        if (source / MANIFEST_NAME).exists():  # Reads the engine's report, without torch.
            options.refuse_for_engine(target)
            graph = stage_graph(source, stage, parsed)
        else:
            graph = stage_graph(source, stage, parsed, options.added_passes(), tokens_for(target))
        content = rendered(graph, form, every_layer)
    if output is None:
        sys.stdout.write(content.decode())
        return
    write_output(output, content)


def rendered(stage: StageGraph, form: str, every_layer: bool) -> bytes:
    from llmc.debug.viz.dot import dot_text, svg_text
    from llmc.debug.viz.drawing import draw
    from llmc.debug.viz.mermaid import mermaid_text
    from llmc.debug.viz.stage_graph import json_text

    if form == "json":
        return json_text(stage).encode()
    drawing = draw(stage, every_layer)
    if form == "mermaid":
        return mermaid_text(drawing).encode()
    return (svg_text if form == "svg" else dot_text)(drawing, stage.origins).encode()
