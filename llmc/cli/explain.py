"""`llmc explain`: what was fused, what was not, and why, with the line of the model's source."""

from __future__ import annotations

import json as json_text
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from llmc.cli.model_argument import model_argument
from llmc.cli.model_options import ModelOptions
from llmc.cli.status_line import status_line
from llmc.cli.target_option import DEFAULT_TARGET, TargetOption

if TYPE_CHECKING:
    from llmc.report.explanation import Explanation
    from llmc.report.explanation_text import Line


def explain(
    model: Annotated[Path, model_argument("model directory, or an engine")],
    only_pass: Annotated[str | None, typer.Option("--pass", help="show every rewrite and refusal of one pass")] = None,
    node: Annotated[str | None, typer.Option(help="show the history of one node")] = None,
    *,
    target: TargetOption = DEFAULT_TARGET,
    options: ModelOptions,
    strict: Annotated[bool, typer.Option("--strict", help="exit with code 2 if coverage is incomplete")] = False,
    json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Show what each pass rewrote and, for each near-miss, the expected and actual values and the source line."""
    from llmc.report.coverage.coverage import check_complete
    from llmc.report.explanation import history
    from llmc.report.explanation_text import history_lines, overview_lines, pass_lines

    explanation = _explanation(model, options, target)
    if json:
        print(json_text.dumps(explanation.to_json(), indent=1, ensure_ascii=False))
    elif node is not None:
        _print(history_lines(node, history(explanation, node)))
    elif only_pass is not None:
        _print(pass_lines(explanation.named(only_pass)))
    else:
        _print(overview_lines(str(model), explanation))
    if explanation.error is not None:
        raise explanation.error
    if strict:
        check_complete(explanation.coverage)


def _print(lines: Iterable[Line]) -> None:
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    for line in lines:
        console.print(Text(line.text, style=line.style))


def _explanation(model: Path, options: ModelOptions, target: str) -> Explanation:
    from llmc.engine_format.manifest import MANIFEST_NAME

    if (model / MANIFEST_NAME).exists():
        from llmc.report.explanation import explain_engine

        options.refuse_for_engine(target)
        return explain_engine(model)
    with warnings.catch_warnings(), status_line("capturing and rewriting") as tell:
        # Torch's warnings about its own graphs, which a user cannot act on.
        warnings.filterwarnings("ignore", "Raw SymInt value")
        from llmc.codegen.target_kind import kind_of
        from llmc.debug.explain_model import explain_model
        from llmc.frontends.capture import capture
        from llmc.targets import resolve_target

        parsed, passes, kind = options.parse(), options.passes(), kind_of(resolve_target(target))
        kind.check(parsed)
        return explain_model(capture(model, parsed, may_lack_weights=True), passes, parsed, tell, kind.tokens)
