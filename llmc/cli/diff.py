"""`llmc diff`: the effect of each pass on a model's logits, or the differences between two engines."""

from __future__ import annotations

import json as json_text
import math
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from llmc.cli.model_argument import model_argument
from llmc.cli.model_options import ModelOptions
from llmc.cli.repeated_rows import fold
from llmc.cli.sample_options import SampleOptions
from llmc.cli.status_line import status_line
from llmc.cli.table import Column, FittingTable, numeric, standard_output
from llmc.cli.target_option import DEFAULT_TARGET, TargetOption, tokens_for
from llmc.debug.sample_tokens import Sample, sample_tokens
from llmc.errors import OptionError
from llmc.plural import counted

if TYPE_CHECKING:
    from llmc.debug.difference import Difference
    from llmc.debug.engine_diff import EngineDifference
    from llmc.debug.pass_diff import ModelDifference, PassDifference, RewriteDifference

OVER_BUDGET = 1
# Rows of a section in the comparison of two engines: up to eleven sections fit on a screen.
_SECTION = 2


def diff(
    model: Annotated[Path, model_argument("model directory, or an engine to compare with another")],
    other: Annotated[Path | None, typer.Argument(help="the other engine")] = None,
    passes: Annotated[str | None, typer.Option(help="passes to compare: A..B, A.., ..B or A; default: all")] = None,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="show every rewrite that changed a bit, with its nodes")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="for two engines: show every row that differs")] = False,
    *,
    sample: SampleOptions,
    target: TargetOption = DEFAULT_TARGET,
    options: ModelOptions,
    json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Compare the graph before and after each pass on the same tokens; or compare two engines.

    The exit code is 1 if a pass changed the logits by more than its numerics class allows.
    """
    if other is not None:
        if passes is not None or nodes or options.chosen or target != DEFAULT_TARGET:
            raise OptionError(
                "the passes of a built engine cannot be run again",
                at=str(other),
                fix="leave out --passes, --nodes and build options",
            )
        _diff_engines(model, other, sample, json, everything)
        return
    model_difference = _diff_model(model, options, target, passes, nodes, sample)
    if json:
        print(json_text.dumps(model_json(model_difference), indent=1, ensure_ascii=False))
    else:
        print_model(standard_output(), str(model), model_difference, nodes)
    if model_difference.error is not None:
        raise model_difference.error
    if model_difference.first_over is not None:
        raise typer.Exit(OVER_BUDGET)


def _diff_model(
    model: Path, options: ModelOptions, target: str, passes: str | None, nodes: bool, sample: Sample
) -> ModelDifference:
    from llmc.engine_format.manifest import MANIFEST_NAME

    if (model / MANIFEST_NAME).exists():
        raise OptionError(
            "a single engine cannot be compared",
            at=model,
            fix="name a second engine, or the model directory to see what each pass does",
        )
    parsed = options.parse()
    with status_line("capture") as tell:
        from llmc.debug.pass_diff import diff_passes, pass_range
        from llmc.frontends.capture import capture

        pipeline = options.passes()
        first, last = parse_range(passes)
        pass_range(pipeline, first, last)  # Mistakes in it are reported before the model is read.
        captured = capture(model, parsed)
        info = captured.graph.info
        ids = sample_tokens(model / "tokenizer.json", info.vocab_size, sample, info.max_positions)
        return diff_passes(
            captured,
            pipeline,
            parsed,
            ids,
            first=first,
            last=last,
            by_rewrite=nodes,
            progress=lambda name: tell(f"run {name}"),
            token_default=tokens_for(target),
        )


def parse_range(passes: str | None) -> tuple[str | None, str | None]:
    """The ends of A..B, A.., ..B, or A for one pass."""
    if passes is None:
        return None, None
    first, dots, last = passes.partition("..")
    return first or None, (last or None) if dots else first


def print_model(console: Console, name: str, difference: ModelDifference, nodes: bool) -> None:
    """Print one row per pass and the verdict. With nodes, also the rewrites of each pass that changed a bit."""
    dtype = str(difference.dtype).removeprefix("torch.")
    named = (Column(""), Column("pass"), Column("numerics", rank=6))
    numbers = numeric(("n", 5), ("max |Δ|", 3), ("mean |Δ|", 4), "relative", ("allowed", 1), ("top-1", 2))
    table = FittingTable(f"{name}, {dtype}, on {counted(len(difference.tokens), 'token')}", (*named, *numbers))
    for pass_ in difference.passes:
        *figures, top1 = _cells(pass_.difference)
        cells = (pass_.name, pass_.numerics, str(pass_.count), *figures, f"{pass_.budget:.0e}", top1)
        table.add_row("✗" if pass_.is_over else "", *cells, style="bold red" if pass_.is_over else "")
    console.print(table)
    for pass_ in difference.passes:
        if pass_.error is not None:
            console.print(Text(f"after {pass_.name}: {pass_.error}", style="red"), soft_wrap=True)
        if nodes:
            print_rewrites(console, pass_)
    last = difference.passes[-1].since_capture if difference.passes else None
    if last is not None:
        console.print(f"from the captured graph to here: relative {_short(last.relative)}, top-1 {last.top1:.1%}")
    for note in difference.notes:
        console.print(Text(note), soft_wrap=True)
    first = difference.first_over
    if first is not None:
        console.print(Text(f"✗ {first.name} is the first pass over its budget", style="bold red"))
    elif difference.error is None:
        console.print(Text("every pass stays within its numerics class", style="green"))
        if "float32" not in str(difference.dtype):
            console.print("rounding hides what is smaller than that: --dtype float32 checks to 1e-4", style="dim")


def print_rewrites(console: Console, difference: PassDifference) -> None:
    """The rewrites of a pass that changed a bit, with their nodes and source lines."""
    changed = [r for r in difference.rewrites if r.difference is None or not r.difference.is_zero]
    unchanged = len(difference.rewrites) - len(changed)
    console.print(
        Text(
            f"{difference.name}: {unchanged} of {counted(len(difference.rewrites), 'rewrite')} change no bit",
            style="bold",
        )
    )
    for source, group in groupby(changed, key=lambda r: r.rewrite.source):
        console.print(Text(f"  {source or 'no line of the model'}"), soft_wrap=True)
        for rewrite in group:
            console.print(_rewrite_line(rewrite, difference.budget), soft_wrap=True)


def _rewrite_line(difference: RewriteDifference, allowed: float) -> Text:
    names = ", ".join(difference.rewrite.made[:4]) + (" …" if len(difference.rewrite.made) > 4 else "")
    title = f"    #{difference.rewrite.number} {difference.rewrite.description}" + (f" → {names}" if names else "")
    if difference.difference is None:
        return Text(f"{title}: {difference.error}", style="bold red")
    d = difference.difference
    figures = f"max {_short(d.max)}, mean {_short(d.mean)}, relative {_short(d.relative)}, top-1 {d.top1:.1%}"
    return Text(f"{title}: {figures}", style="" if d.within(allowed) else "bold red")


def _cells(difference: Difference | None) -> tuple[str, str, str, str]:
    if difference is None:
        return ("does not run", "", "", "")
    d = difference
    return (_short(d.max), _short(d.mean), _short(d.relative), f"{d.top1:.1%}")


def _short(number: float) -> str:
    return "0" if number == 0 else f"{number:.1e}"


def model_json(difference: ModelDifference) -> dict[str, Any]:
    """Return a comparison as plain data for JSON; NaN and infinity become null."""

    def figures(d: Difference | None) -> dict[str, float | None] | None:
        if d is None:
            return None
        values = {"max": d.max, "mean": d.mean, "spread": d.spread, "relative": d.relative, "top1": d.top1}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    return {
        "tokens": list(difference.tokens),
        "dtype": str(difference.dtype).removeprefix("torch."),
        "first_over": None if difference.first_over is None else difference.first_over.name,
        "error": None if difference.error is None else str(difference.error),
        "notes": list(difference.notes),
        "passes": [
            {
                "name": pass_.name,
                "numerics": pass_.numerics,
                "budget": pass_.budget,
                "is_over": pass_.is_over,
                "rewrites": pass_.count,
                "difference": figures(pass_.difference),
                "since_capture": figures(pass_.since_capture),
                "error": pass_.error,
                "by_rewrite": [
                    {
                        "number": r.rewrite.number,
                        "description": r.rewrite.description,
                        "nodes": r.rewrite.nodes,
                        "made": r.rewrite.made,
                        "source": r.rewrite.source,
                        "difference": figures(r.difference),
                        "error": r.error,
                    }
                    for r in pass_.rewrites
                ],
            }
            for pass_ in difference.passes
        ],
    }


def _diff_engines(first: Path, second: Path, sample: Sample, json: bool, everything: bool) -> None:
    from llmc.debug.engine_diff import diff_engines

    with status_line("comparing the engines"):
        engine_difference = diff_engines(first, second, sample)
    if json:
        from llmc.files.typed_json import to_json

        print(json_text.dumps(to_json(engine_difference), indent=1, ensure_ascii=False))
    else:
        print_engines(standard_output(), first, second, engine_difference, everything=everything)


def print_engines(
    console: Console, first: Path, second: Path, difference: EngineDifference, *, everything: bool = False
) -> None:
    """Print the differences in one table, and those of the logits."""
    columns = (Column("differ"), Column(""), Column(str(first), wraps=True), Column(str(second), wraps=True))
    table, left = FittingTable("", columns), 0
    for section, group in groupby(difference.changes, key=lambda c: c.section):
        changes = [tuple(x or "none" for x in (change.name, change.first, change.second)) for change in group]
        rows = changes if everything else fold(changes)
        shown = rows if everything else rows[:_SECTION]
        left += len(rows) - len(shown)
        for number, row in enumerate(shown):
            table.add_row(f"{section} ({len(changes)})" if number == 0 else "", *row)
    if left:
        table.caption = f"{counted(left, 'more row')}, and each of {counted(len(difference.changes), 'row')}: --all"
    if difference.changes:
        console.print(table)
    if not difference.changes:
        console.print("the same model, target, options, passes, graphs, kernels, weights and sizes")
    if difference.logits is None:
        console.print(Text(f"the logits were not compared: {difference.why_not}", style="yellow"), soft_wrap=True)
        return
    d = difference.logits
    console.print(
        f"logits on {counted(d.tokens, 'token')}: max |Δ| {_short(d.max_difference)}, "
        f"mean {_short(d.mean_difference)}, "
        f"relative {_short(d.relative_difference)}, top-1 {d.top1_agreement:.1%}, "
        f"perplexity {d.reference_perplexity:.3f} → {d.perplexity:.3f}",
        soft_wrap=True,
    )
