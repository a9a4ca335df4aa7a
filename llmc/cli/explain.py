"""`llmc explain`: what was fused, what was not, and why, with the line of the model's source."""

from __future__ import annotations

import json as json_text
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from llmc.cli.model_options import ModelOptions

if TYPE_CHECKING:
    from llmc.debug.coverage import Coverage
    from llmc.debug.explain import Explanation, NodeHistory
    from llmc.passes.report import PassRecord, RefusalRecord, RewriteRecord

# More rewrites than this at one source line are shown as a count; --pass shows each.
_SHOWN_NODES = 6


def explain(
    model: Annotated[Path, typer.Argument(help="model directory, or an engine")],
    only_pass: Annotated[str | None, typer.Option("--pass", help="every rewrite and refusal of one pass")] = None,
    node: Annotated[str | None, typer.Option(help="what happened to one node")] = None,
    *,
    options: ModelOptions,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 2 if anything is not covered")] = False,
    json: Annotated[bool, typer.Option("--json", help="everything as JSON")] = False,
) -> None:
    """Say what each pass rewrote and, for each near-miss, what it expected, what it found, and where."""
    from llmc.debug.coverage import check_complete
    from llmc.debug.explain import history

    explanation = _explanation(model, options)
    printer = Printer(Console(highlight=False, soft_wrap=True, emoji=False))
    if json:
        print(json_text.dumps(explanation.to_json(), indent=1, ensure_ascii=False))
    elif node is not None:
        printer.history(node, history(explanation, node))
    elif only_pass is not None:
        printer.one_pass(explanation.named(only_pass))
    else:
        printer.overview(str(model), explanation)
    if explanation.error is not None:
        raise explanation.error
    if strict:
        check_complete(explanation.coverage)


def _explanation(model: Path, options: ModelOptions) -> Explanation:
    from llmc.engine_format.manifest import MANIFEST_NAME

    if (model / MANIFEST_NAME).exists():
        from llmc.debug.explain import explain_engine

        options.refuse_for_engine()
        return explain_engine(model)
    with Console(stderr=True).status("capturing and rewriting") as status:
        from llmc.debug.explain import explain_model
        from llmc.graph.capture import capture

        parsed, passes = options.parse(), options.passes()
        return explain_model(capture(model, parsed), passes, parsed, status.update)


class Printer:
    """Writes explanations to a console, a line each, however long: they are read with grep as often as by eye."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def overview(self, name: str, explanation: Explanation) -> None:
        """Coverage, then what each pass rewrote, by source line, then every near-miss."""
        self._line(f"coverage of {name}", "bold")
        for each in explanation.coverage:
            self._coverage(each)
        if not explanation.coverage:
            self._line("  nothing was found that a pass could cover")
        self._line("")
        self._line("what the passes rewrote", "bold")
        for record in explanation.passes:
            if record.rewrites:
                count = len(record.rewrites)
                numbers = (
                    f"#{record.rewrites[0].number}–{record.rewrites[-1].number}"
                    if count > 1
                    else f"#{record.rewrites[0].number}"
                )
                self._line(f"  {record.name}: {count} {_plural(count, 'rewrite')}, {numbers} ({record.numerics})")
        refused = [(record, refusal) for record in explanation.passes for refusal in record.refusals]
        self._line("")
        self._line(f"near-misses: {len(refused)}", "bold")
        for record, refusal in refused:
            self.refusal(record.name, refusal)

    def one_pass(self, record: PassRecord) -> None:
        """Every rewrite of a pass under the source line it is about, and every near-miss."""
        count = len(record.rewrites)
        self._line(
            f"{record.name} ({record.numerics}): {count} {_plural(count, 'rewrite')}, "
            f"{len(record.refusals)} refused, {record.nodes_before} → {record.nodes_after} nodes",
            "bold",
        )
        for source, group in groupby(record.rewrites, key=lambda r: r.source):
            self._line(f"  {source or 'no line of the model'}")
            for rewrite in group:
                self._line(f"    {_rewrite(rewrite)}")
        for refusal in record.refusals:
            self.refusal(record.name, refusal)

    def history(self, name: str, found: NodeHistory) -> None:
        """Where a node comes from, what became of it, what was refused because of it."""
        self._line(name, "bold")
        if found.made is not None:
            self._line(f"  made by {found.made[0]} {_rewrite(found.made[1])}")
            self._source(found.made[1].source)
        else:
            self._line("  is of the captured graph")
        for pass_name, rewrite in found.used:
            self._line(f"  rewritten by {pass_name} {_rewrite(rewrite)}")
            self._source(rewrite.source)
        for pass_name, refusal in found.refused:
            self.refusal(pass_name, refusal)

    def refusal(self, pass_name: str, refusal: RefusalRecord) -> None:
        """A near-miss with everything that is known of it."""
        self._line(f"  ✗ {pass_name} left {refusal.node} alone: {refusal.reason}", "yellow")
        if refusal.expected is not None:
            self._line(f"      expected  {refusal.expected}")
        if refusal.found is not None:
            self._line(f"      found     {refusal.found}")
        operands = ", ".join(f"{o.name}: {o.type}" for o in refusal.operands)
        self._line(f"      node      {refusal.node}: {refusal.type} = {refusal.op}({operands})")
        for user in refusal.users:
            mark = "  ← in the way" if user.name in refusal.extra_users else ""
            source = f"  {user.source}" if mark and user.source else ""
            self._line(f"      used by   {user.name}: {user.type} = {user.op}{mark}{source}")
        self._source(refusal.source)

    def _coverage(self, each: Coverage) -> None:
        self._line(f"  {'✗' if each.short else '✓'} {each}", "yellow" if each.short else "green")
        for (source, reasons), group in groupby(each.left, key=lambda left: (left.source, each.reasons(left))):
            nodes = list(group)
            names = ", ".join(left.node for left in nodes[:_SHOWN_NODES]) + (" …" if len(nodes) > _SHOWN_NODES else "")
            self._line(f"      {names} ({nodes[0].op} → {nodes[0].type}): {'; '.join(reasons)}")
            self._source(source)

    def _source(self, source: str | None) -> None:
        if source is not None:
            self._line(f"      line      {source}")

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))


def _rewrite(rewrite: RewriteRecord) -> str:
    made = rewrite.made[:_SHOWN_NODES]
    arrow = f" → {', '.join(made)}{' …' if len(rewrite.made) > len(made) else ''}" if made else ""
    return f"#{rewrite.number} {rewrite.description}{arrow}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
