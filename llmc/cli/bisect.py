"""`llmc bisect`: the one rewrite that makes a check fail, and a directory that shows it."""

from __future__ import annotations

import contextlib
import json as json_text
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from llmc.cli.build import added_passes
from llmc.cli.verify import TOLERANCE
from llmc.errors import LlmcError, OptionError
from llmc.options import BuildOptions, parse_options

if TYPE_CHECKING:
    from torch import Tensor

    from llmc.debug.bisect import Check, Culprit, Outline, Probe
    from llmc.debug.memo_run import MemoRun
    from llmc.debug.reproduction import Reproduction
    from llmc.graph.capture import Captured
    from llmc.passes.rewrite import Pass


def bisect(
    model: Annotated[Path, typer.Argument(help="model directory")],
    check: Annotated[
        str | None,
        typer.Option(help="shell command that exits with 0 for a good cut: {engine} {graph} {logits} {number}"),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="model directory or engine whose logits are right; default: the captured graph")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="largest difference over the logits' spread; default by dtype")
    ] = None,
    slower_than: Annotated[
        float | None, typer.Option(help="find what makes a decode step take this many times as long")
    ] = None,
    good: Annotated[int, typer.Option(help="start from this many rewrites, known to be good", min=0)] = 0,
    at: Annotated[int | None, typer.Option(help="only check with and without this rewrite", min=1)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where the reproduction goes; default MODEL-bisect")
    ] = None,
    target: Annotated[str, typer.Option(help="of engines that are built for the check")] = "cpu",
    text: Annotated[Path | None, typer.Option(help="text file to run on; default: a paragraph of prose")] = None,
    tokens: Annotated[str | None, typer.Option(help="token ids to run on: 1,2,3")] = None,
    length: Annotated[int, typer.Option(help="how many tokens", min=2)] = 32,
    seed: Annotated[int, typer.Option(help="of random ids, where there is no tokenizer")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="of the KV cache: the same names")] = "auto",
    disable_pass: Annotated[list[str] | None, typer.Option(help="skip a pass by name (repeatable)")] = None,
    allow_fallback: Annotated[list[str] | None, typer.Option(help="a contract that may be missed (repeatable)")] = None,
    passes_from: Annotated[
        list[str] | None, typer.Option(help="more passes: module:attribute or file.py:attribute (repeatable)")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="the finding as JSON")] = False,
) -> None:
    """Cut the pipeline in ever smaller steps until one rewrite is left that makes the check fail.

    Checks: --check COMMAND; --slower-than RATIO; otherwise logits, against those of --against or of the captured
    graph. A pass that crashes fails every check.
    """
    options = parse_options(
        {
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "disable_passes": tuple(disable_pass or ()),
            "allow_fallback": tuple(allow_fallback or ()),
        }
    )
    asked = Asked(check, against, tolerance, slower_than)
    asked.validate()
    directory = output or Path(f"{model.name}-bisect")
    if at is None and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise OptionError("the directory is not empty", at=directory, fix="name another with --output, or remove it")
    console = Console(highlight=False, emoji=False, stderr=json)
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bars, tempfile.TemporaryDirectory(prefix="llmc-bisect-") as scratch:
        task = bars.add_task("capture", total=None)
        session = _session(
            model, options, passes_from, (text, tokens, length, seed), asked, target, good, Path(scratch)
        )
        bars.update(task, description="run the check")
        shown = partial(_show_probe, console, session.whole)
        if at is not None:
            _check_at(session, at, shown)
            return
        from llmc.debug.bisect import bisect as search

        culprit = search(session.whole, session.check, good=good, uncut=session.uncut, progress=shown)
        bars.update(task, description="write the reproduction")
        command = _command_line(culprit.bad)
        culprit, found = _reproduce(session, culprit, directory, command)
    _report(console, culprit, found)
    if json:
        from llmc.typed_json import to_json

        print(json_text.dumps(to_json(culprit), indent=1, ensure_ascii=False))


@dataclass(frozen=True)
class Asked:
    """Which check the user wants."""

    check: str | None
    against: Path | None
    tolerance: float | None
    slower_than: float | None

    def validate(self) -> None:
        """Raise OptionError for two checks at once, or a figure out of range."""
        given = [
            name
            for name, value in (
                ("--check", self.check),
                ("--against", self.against),
                ("--slower-than", self.slower_than),
            )
            if value is not None
        ]
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} are two checks", at=given[1], fix="give one")
        if self.tolerance is not None and (self.check is not None or self.slower_than is not None):
            raise OptionError("--tolerance is about logits", at="--tolerance", fix=f"leave it out with {given[0]}")
        for name, value in (("--tolerance", self.tolerance), ("--slower-than", self.slower_than)):
            if value is not None and not 0 <= value < float("inf"):
                raise OptionError(f"{name} cannot be {value}", at=name, fix="give a number from 0 on")
        if self.check is not None and not self.check.strip():
            raise OptionError("the command is empty", at="--check", fix="give a shell command")

    @property
    def needs_engine(self) -> bool:
        """Whether cuts are built into engines: not all cuts can be, but only engines have a speed."""
        engine = self.check is not None and ("{engine}" in self.check or "LLMC_BISECT_ENGINE" in self.check)
        return self.slower_than is not None or engine


@dataclass(frozen=True)
class Session:
    """A captured model, its pipeline, and the check. uncut: passes that every cut needs whole."""

    captured: Captured
    passes: Sequence[Pass]
    options: BuildOptions
    runner: MemoRun
    whole: Outline
    check: Check
    uncut: frozenset[str]


def _session(
    model: Path,
    options: BuildOptions,
    passes_from: list[str] | None,
    sample: tuple[Path | None, str | None, int, int],
    asked: Asked,
    target: str,
    good: int,
    scratch: Path,
) -> Session:
    from llmc.debug.bisect import outline
    from llmc.debug.memo_run import MemoRun, default_chunks
    from llmc.debug.sample_tokens import sample_tokens
    from llmc.engine_format.manifest import MANIFEST_NAME
    from llmc.graph.capture import capture
    from llmc.passes.pipeline import default, essential

    if (model / MANIFEST_NAME).exists():
        raise OptionError(
            "an engine's passes cannot be run again", at=model, fix="name the model directory that it was built from"
        )
    pipeline = added_passes(passes_from) or default()
    captured = capture(model, options)
    text, tokens, length, seed = sample
    ids = sample_tokens(
        model / "tokenizer.json",
        captured.graph.info.vocab_size,
        text=text,
        tokens=tokens,
        length=length,
        seed=seed,
        max_length=captured.graph.info.max_positions,
    )
    runner = MemoRun(captured.source, ids, chunk_sizes=default_chunks(len(ids)), block_size=options.block_size)
    whole = outline(captured.graph, pipeline, options)
    check = _check(
        asked, captured, pipeline, options, runner, partial(_build, model, target, pipeline, options), good, scratch
    )
    return Session(
        captured, pipeline, options, runner, whole, check, essential() if asked.needs_engine else frozenset()
    )


def _check(
    asked: Asked,
    captured: Captured,
    passes: Sequence[Pass],
    options: BuildOptions,
    runner: MemoRun,
    build: Any,
    good: int,
    scratch: Path,
) -> Check:
    from llmc.debug.check_passes import BUDGETS
    from llmc.debug.cut_checks import CommandCheck, LogitCheck, SpeedCheck
    from llmc.passes.rewrite import Numerics

    if asked.slower_than is not None:
        return SpeedCheck(build, runner.tokens, asked.slower_than, good, scratch)
    if asked.check is not None:
        return CommandCheck(asked.check, captured.graph, passes, options, runner, build if asked.needs_engine else None)
    dtype = captured.graph.info.dtype
    # A reference in fp32 is further away than the graph that the passes started from.
    default = (
        BUDGETS[Numerics.REORDER, dtype] if asked.against is None else TOLERANCE[str(dtype).removeprefix("torch.")]
    )
    allowed = default if asked.tolerance is None else asked.tolerance
    reference = runner.logits(captured.graph) if asked.against is None else _reference(asked.against, runner.tokens)
    vocabulary = captured.graph.info.vocab_size
    if reference.shape[-1] != vocabulary:
        raise OptionError(
            f"the reference has {reference.shape[-1]} tokens in its vocabulary, the model {vocabulary}",
            at=f"--against {asked.against}",
            fix="name the model that this one should agree with",
        )
    return LogitCheck(captured.graph, passes, options, runner, reference, allowed)


def _reference(against: Path, tokens: Sequence[int]) -> Tensor:
    import torch

    from llmc.debug.compare import hf_logits
    from llmc.engine_format.manifest import MANIFEST_NAME
    from llmc.runtime.engine import load

    if (against / MANIFEST_NAME).exists():
        with load(against) as engine:
            return torch.from_numpy(engine.logits(tokens).copy())
    return torch.from_numpy(hf_logits(against)(tokens))


def _build(model: Path, target: str, passes: Sequence[Pass], options: BuildOptions, number: int, path: Path) -> None:
    from llmc.compiler import build

    changed = {**options.model_dump(), "stop_after": number, "finish_cut": True}
    build(model, path, target=target, passes=passes, **changed)


def _check_at(session: Session, number: int, shown: Any) -> None:
    """The check on both sides of one rewrite; LlmcError if they are not good and bad."""
    from llmc.debug.bisect import Probe

    if number > len(session.whole.rewrites):
        raise OptionError(
            f"there are {len(session.whole.rewrites)} rewrites", at=f"--at {number}", fix="give a lower one"
        )
    outcomes = []
    for each in (number - 1, number):
        outcomes.append(session.check(each))
        shown(Probe(each, outcomes[-1]))
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

    captured = session.captured
    cut = partial(cut_graph, captured.graph, session.passes, session.options)
    without = culprit.bad - 1 if culprit.rewrite is not None else culprit.good
    before, after, piece = cut(without), None, None
    if culprit.rewrite is not None:
        with contextlib.suppress(LlmcError):  # Where the rewrite itself fails, there is no graph after it.
            after = cut(culprit.bad)
        if after is not None:
            culprit = with_made_nodes(culprit, after)
            piece = changed_region(before, after, session.runner, captured.source)
    return culprit, write_reproduction(directory, culprit, before, after, piece, command)


def _command_line(number: int) -> list[str]:
    """This command again, for one rewrite only."""
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


def _report(console: Console, culprit: Culprit, found: Reproduction) -> None:
    """What was found, and where it can be seen."""
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
    if found.local is not None:
        line(f"  by itself it changes what it computes by {found.local.relative:.1e} of its spread")
    if found.error is not None:
        line(f"  what it makes does not run: {found.error}")
    line(f"{len(culprit.probes)} runs of the check; reproduction in {found.directory}:")
    if (found.directory / "repro.py").exists():
        line(f"  python {shlex.quote(str(found.directory / 'repro.py'))}")
    line(f"  sh {shlex.quote(str(found.directory / 'check.sh'))}")
