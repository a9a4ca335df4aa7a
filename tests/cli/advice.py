"""The commands that errors and notes of llmc tell a user to run, read off its sources."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmc.cli.app import GROUPS, PANELS
from tests.parsed_source import parsed

PACKAGE = Path(__file__).parent.parent.parent / "llmc"
VERBS = frozenset({*GROUPS, *(name for names in PANELS.values() for name in names)})
_COMMAND = re.compile(r"\bllmc (?P<words>[a-z][^,;)`\n]*)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# What stands for values that are known when an error is raised, and for what a user puts in.
FIELDS = {"flags": "--max-model-len 64", "self._kind.value": "captures", "scheme": "int4", "stage": "optimized"}
VALUE = "VALUE"
PLACES = {"N": "8", "TARGET": "reference", "NAME=DIRECTORY": "a=DIRECTORY", "…": "text", "SCHEME": "int4"}


@dataclass(frozen=True)
class Advice:
    """A text of the sources with fields filled in. place: its file and line."""

    place: str
    text: str

    def commands(self) -> Iterator[tuple[str, ...]]:
        """The words behind `llmc` of each command that it names, of the verbs that there are."""
        for match in _COMMAND.finditer(self.text):
            words = tuple(PLACES.get(word, word) for word in shlex.split(match["words"]))
            if words[0] in VERBS:
                yield words

    def flags(self) -> Iterator[str]:
        """The flags in a sentence; other programs' stand alone."""
        if " " in self.text:
            yield from _FLAG.findall(self.text)


def all_advice() -> list[Advice]:
    """Every text of the sources that may be shown, but for docstrings and the help of options."""
    advice: list[Advice] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = parsed(path)
        silent = {id(node) for part in _silent(tree) for node in ast.walk(part)}
        for node in ast.walk(tree):
            text = None if id(node) in silent else _text(node)
            if text is not None and isinstance(node, ast.expr):
                silent.update(id(part) for part in ast.walk(node))
                # Pages are generated of texts with many lines.
                advice += [] if "\n\n" in text else [Advice(f"{path.relative_to(PACKAGE)}:{node.lineno}", text)]
    return advice


def _silent(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            yield node
        if isinstance(node, ast.keyword) and node.arg in ("help", "epilog", "metavar"):
            yield node


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(value) for value in node.values)
    return None


def _part(node: ast.expr) -> str:
    if isinstance(node, ast.FormattedValue):
        return FIELDS.get(ast.unparse(node.value), VALUE)
    assert isinstance(node, ast.Constant)
    return str(node.value)
