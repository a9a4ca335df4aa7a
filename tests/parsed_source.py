"""The sources of llmc as trees, each parsed once for all tests that walk them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """Of a file that does not change any more."""
    return ast.parse(path.read_text(encoding="utf-8"))
