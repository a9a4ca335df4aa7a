"""The order of the passes, read top to bottom."""

from __future__ import annotations

from llmc.passes.rewrite import Pass


def default() -> tuple[Pass, ...]:
    """Every pass of a build, in order."""
    return ()
