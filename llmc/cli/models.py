"""`llmc models`: which causal architectures of transformers compile, which are refused, and why."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from llmc.cli.told_progress import told
from llmc.errors import CaptureError, OptionError
from llmc.targets import resolve_target

if TYPE_CHECKING:
    from llmc.architectures.survey import Outcome


def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="architectures, such as llama or falcon+alibi; default: all"),
    ] = None,
    *,
    target: Annotated[
        str, typer.Option(help="target of the tiny engines; cpu also compiles each of them")
    ] = "reference",
    markdown: Annotated[bool, typer.Option("--markdown", help="print the page docs/models.md")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Build a tiny random model of each architecture and compare it with transformers; takes minutes for all."""
    from llmc.architectures.page import models_page
    from llmc.architectures.survey import LENGTH, outcome_json, survey
    from llmc.architectures.tiny_config import architectures
    from llmc.frontends.transformers.config import import_transformers

    if resolve_target(target).compiled:
        raise OptionError(
            f"this machine cannot run engines for {target}, so their logits cannot be compared",
            at=f"--target {target}",
            fix="choose reference, cpu, or another target that `llmc targets` lists as running here",
        )
    transformers = import_transformers()
    known = dict(architectures())
    wanted = names or list(known)
    for name in wanted:
        if name not in known:
            raise CaptureError(
                f"transformers {transformers.__version__} has no causal architecture {name!r}",
                at=f"model type {name!r}",
                fix="list all of them: llmc models",
            )
    transformers.logging.set_verbosity_error()
    outcomes = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    with warnings.catch_warnings(), told(progress):
        warnings.simplefilter("ignore")
        task = progress.add_task("", total=len(wanted))
        for name in wanted:
            progress.update(task, description=name)
            outcomes.append(survey(name, known[name], target))
            progress.advance(task)
    if markdown:
        print(models_page(outcomes, transformers.__version__, LENGTH), end="")
    elif as_json:
        print(json.dumps([outcome_json(outcome) for outcome in outcomes], indent=1, ensure_ascii=False))
    else:
        _show(outcomes)


def _show(outcomes: list[Outcome]) -> None:
    from llmc.architectures.page import figure

    table = Table(title="architectures", title_justify="left")
    table.add_column("type", style="bold", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("why", overflow="fold")
    for outcome in outcomes:
        # A reason may have brackets, which rich would take for its markup.
        result = f"{outcome.verdict.value} {figure(outcome)}".strip()
        table.add_row(*map(Text, (outcome.model_type, result, outcome.reason or "")))
    console = Console()
    console.print(table)
    counts = Counter(outcome.verdict.value for outcome in outcomes)
    console.print(", ".join(f"{count} {name}" for name, count in counts.most_common()), highlight=False)
