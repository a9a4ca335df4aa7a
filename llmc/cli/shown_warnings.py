"""Warnings of builds and loads on the command line: one line on standard error."""

import warnings
from typing import Any

from rich.console import Console
from rich.text import Text

from llmc.errors import BuildWarning, LoadWarning


def show_warning(problem: str) -> None:
    """Print a warning on one line, whatever its length."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("warning: ", "bold yellow"), problem))


def show_warnings_plainly() -> None:
    """Make Python print llmc's warnings in this form as well, for verbs that build a model or load an engine. Other
    warnings are unchanged."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, BuildWarning | LoadWarning):
            show_warning(str(message))
        else:
            usual(message, category, *place, **more)

    warnings.showwarning = show
