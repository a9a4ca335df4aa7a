"""`llmc passes`: the pipeline, and what it does to a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.model_argument import model_argument
from llmc.cli.model_options import ModelOptions
from llmc.cli.status_line import status_line
from llmc.cli.table import Column, FittingTable, numeric, standard_output
from llmc.cli.target_option import DEFAULT_TARGET, TargetOption, tokens_for

if TYPE_CHECKING:
    from llmc.passes.rewrite import Pass


def passes(
    model: Annotated[Path | None, model_argument("model directory to run the pipeline on")] = None,
    *,
    target: TargetOption = DEFAULT_TARGET,
    chosen: ModelOptions,
    stop_after: Annotated[int | None, typer.Option(help="cut the pipeline after this rewrite number")] = None,
    graph: Annotated[bool, typer.Option("--graph", help="print the resulting graph")] = False,
    rewrites: Annotated[bool, typer.Option("--rewrites", help="list every rewrite with its number")] = False,
    refusals: Annotated[bool, typer.Option("--refusals", help="list every near-miss with its reason")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print the page docs/passes.md, from the passes' docstrings")
    ] = False,
) -> None:
    """List the passes in order; with a model, also what each pass rewrote and refused."""
    console = standard_output()
    if markdown:
        from llmc.debug.prove.verdict import prove
        from llmc.passes.catalog import passes_page
        from llmc.passes.pipeline import built_in

        print(passes_page({pass_.name: str(prove(pass_)) for pass_ in built_in()}), end="")
        return
    pipeline = chosen.passes()
    if model is None:
        console.print(pass_list(pipeline))
        return
    from llmc.debug.dump import dumped
    from llmc.frontends.capture import capture
    from llmc.graph.render import render
    from llmc.passes.model_data import ModelData
    from llmc.passes.runner import run_pipeline

    options = chosen.parse(stop_after=stop_after)
    with status_line("capturing and rewriting"):
        captured = capture(model, options)
        data = ModelData(captured.source, captured.tokenizer, tokens=tokens_for(target))
        result = run_pipeline(captured.graph, pipeline, options, dumped(captured.graph), data)
    if graph:
        print(render(result.graph), end="")
        return
    columns = (Column("pass"), Column("numerics", rank=2), *numeric("rewrites", "refused", ("nodes", 1)))
    table = FittingTable(f"passes on {model}", columns)
    for record in result.records:
        counts = (str(len(record.rewrites)), str(len(record.refusals)))
        table.add_row(record.name, record.numerics, *counts, f"{record.nodes_before} → {record.nodes_after}")
    console.print(table)
    for record in result.records:
        for rewrite in record.rewrites if rewrites else ():
            console.print(f"#{rewrite.number} {record.name}: {rewrite.description}", markup=False, highlight=False)
        for refusal in record.refusals if refusals else ():
            console.print(f"{record.name} left {refusal.node} alone: {refusal.reason}", markup=False, highlight=False)
            if refusal.source is not None:
                console.print(f"    {refusal.source}", markup=False, highlight=False)


def pass_list(passes: Sequence[Pass]) -> FittingTable:
    """Name, numerics class and first docstring line of each pass, in order."""
    from llmc.passes.catalog import docstring

    columns = (
        Column("pass"),
        Column("numerics", rank=2),
        Column("leaves", rank=3),
        Column("what it does", 1, wraps=True),
    )
    table = FittingTable("passes, in order", columns)
    for pass_ in passes:
        table.add_row(
            pass_.name,
            pass_.numerics.value,
            pass_.stage.value if pass_.stage else "as before",
            docstring(pass_).partition("\n")[0],
        )
    return table
