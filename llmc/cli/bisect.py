"""`llmc bisect`: the one rewrite that makes a check fail, and a directory that shows it."""

from __future__ import annotations

import contextlib
import json as json_text
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from llmc.cli.bisect_session import Asked, Session, open_session
from llmc.cli.model_argument import model_argument
from llmc.cli.model_options import ModelOptions
from llmc.cli.sample_options import SampleOptions
from llmc.cli.status_line import status_line
from llmc.cli.target_option import DEFAULT_TARGET, TargetOption
from llmc.errors import LlmcError, OptionError
from llmc.files.scratch_directory import ScratchDirectory
from llmc.plural import counted

if TYPE_CHECKING:
    from llmc.debug.bisect import Culprit, Outline, Probe
    from llmc.debug.reproduction import Reproduction


def bisect(
    model: Annotated[Path, model_argument("model directory")],
    *,
    asked: Asked,
    good: Annotated[int, typer.Option(help="number of rewrites that are known to be good", min=0)] = 0,
    at: Annotated[int | None, typer.Option(help="check only with and without this rewrite", min=1)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="directory for the reproduction; default: MODEL-bisect")
    ] = None,
    target: TargetOption = DEFAULT_TARGET,
    sample: SampleOptions,
    options: ModelOptions,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Find the single rewrite that makes a check fail, by bisecting the pipeline.

    Checks: --check COMMAND; --slower-than RATIO; --oracle onnxruntime; by default logits, compared with those of
    --against or of the captured graph. A pass that crashes fails every check.
    """
    asked.validate()
    directory = output or Path(f"{model.name}-bisect")
    if at is None and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise OptionError("the directory is not empty", at=directory, fix="name another with --output, or remove it")
    console = Console(highlight=False, emoji=False, stderr=json)
    with status_line("capture") as tell, ScratchDirectory() as scratch:
        session = open_session(model, options, sample, asked, target, good, scratch, tell)
        tell("run the check")
        shown = partial(_show_probe, console, session.whole)
        if at is not None:
            _check_at(session, at, shown)
            return
        from llmc.debug.bisect import bisect as search

        culprit = search(session.whole, session.check, good=good, uncut=session.uncut, progress=shown)
        tell("write the reproduction")
        command = _command_line(culprit.bad)
        culprit, reproduction = _reproduce(session, culprit, directory, command)
    _report(console, culprit, reproduction)
    if json:
        from llmc.files.typed_json import to_json

        print(json_text.dumps(to_json(culprit), indent=1, ensure_ascii=False))


def _check_at(session: Session, number: int, shown: Any) -> None:
    """The check on both sides of one rewrite; LlmcError if they are not good and bad."""
    from llmc.debug.bisect import Probe

    if number > len(session.whole.rewrites):
        raise OptionError(
            f"the pipeline has {counted(len(session.whole.rewrites), 'rewrite')}",
            at=f"--at {number}",
            fix="give a lower one",
        )
    outcomes = []
    for cut in (number - 1, number):
        outcomes.append(session.check(cut))
        shown(Probe(cut, outcomes[-1]))
    if not (outcomes[0].is_good and not outcomes[1].is_good):
        raise LlmcError(
            f"rewrite #{number} does not turn the check from good to bad",
            at=f"--at {number}",
            fix="search for the one that does: the same command without --at",
        )


def _reproduce(session: Session, culprit: Culprit, directory: Path, command: list[str]) -> tuple[Culprit, Reproduction]:
    from llmc.debug.bisect import cut_graph, with_made_nodes
    from llmc.debug.region import changed_region
    from llmc.debug.reproduction import write_reproduction

    cut = partial(cut_graph, session.pipeline)
    without = culprit.bad - 1 if culprit.rewrite is not None else culprit.good
    before, after, piece = cut(without), None, None
    if culprit.rewrite is not None:
        with contextlib.suppress(LlmcError):  # Where the rewrite itself fails, there is no graph after it.
            after = cut(culprit.bad)
        if after is not None:
            culprit = with_made_nodes(culprit, after)
            piece = changed_region(before, after, session.runner, session.pipeline.captured.source)
    return culprit, write_reproduction(directory, culprit, before, after, piece, command)


def _command_line(number: int) -> list[str]:
    """Return this command again, for one rewrite only."""
    kept = list(sys.argv[1:])
    for option in ("-o", "--output"):
        while option in kept:
            del kept[kept.index(option) : kept.index(option) + 2]
    kept = [a for a in kept if a != "--json" and not a.startswith("--output=")]
    return ["llmc", *kept, "--at", str(number)]


def _show_probe(console: Console, whole: Outline, probe: Probe) -> None:
    name = f" ({whole.at(probe.number)[0]})" if probe.number else " (captured)"
    verdict = "[green]good[/]" if probe.outcome.is_good else "[red]bad[/] "
    console.print(f"  {verdict} cut after #{probe.number}{name}: ", end="", soft_wrap=True)
    console.print(Text(probe.outcome.detail), soft_wrap=True)


def _report(console: Console, culprit: Culprit, reproduction: Reproduction) -> None:
    """Print the culprit and the location of its reproduction."""
    from llmc.debug.reproduction import title

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    line(title(culprit), "bold red")
    line(f"  {culprit.outcome.detail}")
    rewrite = culprit.rewrite
    if rewrite is not None:
        line(f"  about {', '.join(rewrite.nodes) or 'the whole graph'}; made {', '.join(rewrite.made) or 'nothing'}")
        if rewrite.source is not None:
            line(f"  {rewrite.source}")
    if reproduction.local is not None:
        line(f"  on its own inputs it changes its results by {reproduction.local.relative:.1e} of its spread")
    if reproduction.error is not None:
        line(f"  the resulting graph does not run: {reproduction.error}")
    line(f"{len(culprit.probes)} runs of the check; reproduction in {reproduction.directory}:")
    if (reproduction.directory / "repro.py").exists():
        line(f"  python {shlex.quote(str(reproduction.directory / 'repro.py'))}")
    line(f"  sh {shlex.quote(str(reproduction.directory / 'check.sh'))}")
