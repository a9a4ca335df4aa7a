"""`llmc prove`: prove that the replacements of rewrites compute the same as their patterns."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.status_line import status_line
from llmc.cli.table import Column, FittingTable, numeric, standard_output
from llmc.errors import OptionError

if TYPE_CHECKING:
    from llmc.debug.prove.verdict import Verdict
    from llmc.passes.rewrite import Pass

_STYLES = {"proved": "green", "compared": "yellow", "disproved": "bold red", "skipped": "dim"}
_DISPROVED = 1


def prove(
    names: Annotated[list[str] | None, typer.Argument(metavar="PASS", help="names of passes; default: all")] = None,
    *,
    passes_from: Annotated[
        list[str] | None,
        typer.Option(
            help="your passes: module:attribute or file.py:attribute (repeatable); without names, all of them"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list")] = False,
) -> None:
    """Prove over symbols, at small shapes, that rewrites are exact.

    Pattern and replacement are evaluated over the reals. Elements that sympy cannot decide are compared in 50-digit
    arithmetic at random points, and lossy passes are skipped. The exit code is 1 if a rewrite is disproved.
    """
    from llmc.debug.prove.verdict import Outcome
    from llmc.debug.prove.verdict import prove as verdict_on

    verdicts = []
    with status_line("tracing patterns") as now:
        for pass_ in _chosen(names or [], passes_from or []):
            now(pass_.name)
            verdicts.append(verdict_on(pass_))
    if as_json:
        print(json.dumps([_record(verdict) for verdict in verdicts], indent=2))
    else:
        standard_output().print(_table(verdicts))
    if any(verdict.outcome is Outcome.DISPROVED for verdict in verdicts):
        raise typer.Exit(_DISPROVED)


def _chosen(names: list[str], references: list[str]) -> list[Pass]:
    from llmc.passes.custom import load_passes
    from llmc.passes.pipeline import default, extended

    added = [pass_ for reference in references for pass_ in load_passes(reference)]
    if not names:
        return added or list(default())
    known = {pass_.name: pass_ for pass_ in extended(*added)}
    for name in names:
        if name not in known:
            raise OptionError(f"there is no pass {name!r}", at="llmc prove", fix=f"passes: {', '.join(known)}")
    return [known[name] for name in names]


def _record(verdict: Verdict) -> dict[str, object]:
    """Convert a value for JSON: numbers that are not real become text."""
    record = {**asdict(verdict), "outcome": verdict.outcome.value}
    if verdict.counterexample is not None:
        values = {"before": verdict.counterexample.before, "after": verdict.counterexample.after}
        record["counterexample"] |= {name: v if _is_number(v) else str(v) for name, v in values.items()}
    return record


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _table(verdicts: list[Verdict]) -> FittingTable:
    columns = (Column("pass"), Column("verdict"), *numeric(("forms", 1)), Column("because", wraps=True))
    table = FittingTable("over the reals, at small shapes", columns)
    for verdict in verdicts:
        about = str(verdict.counterexample or verdict.reason or "")
        forms = str(verdict.forms) if verdict.forms else ""
        table.add_row(verdict.name, verdict.outcome.value, forms, about, style=_STYLES[verdict.outcome.value])
    return table
