"""Report constructions that read as a translation, in docstrings, comments, messages and pages.

    python -m docs.check_english            # llmc/, docs/ and the pages of the root
    python -m docs.check_english llmc/ptx docs/gguf.md

Prints the place, the text around each finding and what to write instead. Exits with 1 if there is a finding.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from docs.english_patterns import PATTERNS, EnglishPattern

CHECKED = ("llmc", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
SUFFIXES = frozenset({".py", ".h", ".cpp", ".md"})
# This page quotes the constructions it describes.
QUOTES = frozenset({Path("docs/english_patterns.py")})
# Engines hold the sources of kernels, so their docstrings change only together with the code.
KERNELS = "kernels"
_CONTEXT = 50


@dataclass(frozen=True)
class Paragraph:
    """Prose of a file: the line on which it begins, and its text on one line.

    begins_function: whether it begins the docstring of a function that is not a GPU kernel. is_docstring: whether it is
    part of a docstring.
    """

    line: int
    text: str
    begins_function: bool = False
    is_docstring: bool = False


@dataclass(frozen=True)
class EnglishFinding:
    """A construction found in a file."""

    path: Path
    line: int
    around: str
    pattern: EnglishPattern

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.pattern.name}: …{self.around}… (write: {self.pattern.instead})"


def findings(paths: Iterable[Path]) -> Iterator[EnglishFinding]:
    """Yield every construction of `PATTERNS` in the files and directories.

    Args:
        paths: Files or directories; directories are searched for Python, C++ and Markdown.
    """
    for path in sorted(file for root in paths for file in _files(root)):
        for paragraph in paragraphs(path):
            for pattern in PATTERNS:
                if not _applies(pattern, path, paragraph):
                    continue
                for match in pattern.pattern.finditer(paragraph.text):
                    around = paragraph.text[max(0, match.start() - _CONTEXT) : match.end() + _CONTEXT]
                    yield EnglishFinding(path, paragraph.line, around, pattern)


def paragraphs(path: Path) -> Iterator[Paragraph]:
    """Yield the prose of a file: pages without their code, comments, docstrings and messages of sources.

    Args:
        path: A Markdown, Python or C++ file.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _page(text)
    elif path.suffix == ".py":
        yield from _comments(((t.start[0], t.string) for t in _tokens(text) if t.type == tokenize.COMMENT), "#")
        yield from _strings(text)
    else:
        lines = ((n, line[line.index("//") :]) for n, line in enumerate(text.split("\n"), 1) if "//" in line)
        yield from _comments(lines, "//")


def main(arguments: list[str]) -> int:
    reported = list(findings(Path(argument) for argument in arguments or CHECKED))
    for finding in reported:
        print(finding)
    if reported:
        print(f"{len(reported)} findings", file=sys.stderr)
    return 1 if reported else 0


def _applies(pattern: EnglishPattern, path: Path, paragraph: Paragraph) -> bool:
    if pattern.only_functions:
        return paragraph.begins_function
    return not pattern.only_docstrings or (paragraph.is_docstring and KERNELS not in path.parts)


def _files(root: Path) -> Iterator[Path]:
    candidates = root.rglob("*") if root.is_dir() else [root]
    return (path for path in candidates if path.suffix in SUFFIXES and path not in QUOTES)


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def _comments(comments: Iterable[tuple[int, str]], mark: str) -> Iterator[Paragraph]:
    """Comments on consecutive lines are one paragraph."""
    begin, last, texts = 0, -1, list[str]()
    for line, comment in comments:
        if line != last + 1 and texts:
            yield Paragraph(begin, " ".join(texts))
            texts = []
        if not texts:
            begin = line
        texts.append(comment.lstrip(mark).strip())
        last = line
    if texts:
        yield Paragraph(begin, " ".join(texts))


def _strings(text: str) -> Iterator[Paragraph]:
    """Docstrings by paragraph, and messages: strings of several words on one line."""
    tree = ast.parse(text)
    inside_formatted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    of_functions = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0], ast.Expr)
        and "triton.jit" not in map(ast.unparse, node.decorator_list)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            message = "".join(part.value if _is_text(part) else "`x`" for part in node.values)  # type: ignore[attr-defined]
            if "\n" not in message and message.count(" ") > 1:
                yield Paragraph(node.lineno, _without_code(message))
        elif _is_text(node) and id(node) not in inside_formatted:
            value: str = node.value  # type: ignore[attr-defined]
            if id(node) in documents:
                first, *rest = _split(node.lineno, value, is_docstring=True)  # type: ignore[attr-defined]
                yield replace(first, begins_function=id(node) in of_functions)
                yield from rest
            elif "\n" not in value and value.count(" ") > 1:
                yield Paragraph(node.lineno, _without_code(value))  # type: ignore[attr-defined]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _page(text: str) -> Iterator[Paragraph]:
    """The prose of a Markdown page: cells of tables and paragraphs, without code."""
    prose, in_code = [], False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        indented = line.startswith("    ") and not re.match(r"\s*(?:[*+-]|\d+\.)\s", line)
        prose.append("" if fence or in_code or indented else line)
    yield from _split(1, "\n".join(prose))


def _split(begin: int, text: str, *, is_docstring: bool = False) -> Iterator[Paragraph]:
    """Paragraphs end at empty lines, items of lists and rows of tables."""
    first, texts = begin, list[str]()
    for number, line in enumerate(text.split("\n"), begin):
        item = re.match(r"\s*(?:[*+-] |\d+\. |\||#+ )", line)
        if texts and (item or not line.strip()):
            yield Paragraph(first, _without_code(" ".join(texts)), is_docstring=is_docstring)
            texts = []
        if line.strip():
            if not texts:
                first = number
            texts.append(re.sub(r"^(?:[*+-] |\d+\. |#+ )", "", line.strip()))
    if texts:
        yield Paragraph(first, _without_code(" ".join(texts)), is_docstring=is_docstring)


def _without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", "`x`", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
