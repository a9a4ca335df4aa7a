"""The option `--target` of verbs that run the passes and build no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.completion import complete_targets

if TYPE_CHECKING:
    from llmc.formats.schemes import TokenDefault

TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        help="target whose defaults the passes use (see `llmc targets`)",
        autocompletion=complete_targets,
    ),
]
DEFAULT_TARGET = "cpu"


def tokens_for(target: str) -> TokenDefault:
    """Return how a target rounds tokens by default. Raises TargetError for an unknown target, and the errors of
    importing its code generator."""
    from llmc.codegen.target_kind import kind_of
    from llmc.targets import resolve_target

    return kind_of(resolve_target(target)).tokens
