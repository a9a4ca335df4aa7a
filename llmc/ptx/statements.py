"""Cut PTX text into statements: directives, labels, scopes and instructions, each with its line."""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from llmc.ptx.errors import PtxError

REBUILD = "rebuild the engine with this llmc: llmc build MODEL --target TARGET"


class Kind(Enum):
    DIRECTIVE = "directive"
    LABEL = "label"
    OPEN = "{"
    CLOSE = "}"
    INSTRUCTION = "instruction"


@dataclass(frozen=True)
class Statement:
    """A statement of PTX. text: without its end; of a label, its name."""

    kind: Kind
    text: str
    line: int


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
# Directives that end with their line; all others end with a semicolon or where a scope begins.
_LINE_DIRECTIVE = re.compile(r"\.(?:version|target|address_size|loc|file)\b[^\n]*")
_SECTION = re.compile(r"\.section\s+[^{]*\{[^}]*\}")
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(?:global|const|shared|local|reg|pragma|param)\b[^;]*;"
)
_HEADER = re.compile(r"\.[^{;]*")


def statements(text: str, name: str) -> Iterator[Statement]:
    """The statements of PTX text in order. name: the name of the file. Raises PtxError if the text ends too early."""
    text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    ends = [match.start() for match in re.finditer("\n", text)]
    position, depth = 0, 0
    while True:
        while position < len(text) and text[position] in " \t\r\n;":
            position += 1
        if position == len(text):
            break
        line = bisect_right(ends, position - 1) + 1
        if text[position] in "{}":
            kind = Kind.OPEN if text[position] == "{" else Kind.CLOSE
            depth += 1 if kind is Kind.OPEN else -1
            yield Statement(kind, text[position], line)
            position += 1
        elif text[position] == ".":
            match = next(
                candidate
                for pattern in (_LINE_DIRECTIVE, _SECTION, _VARIABLE, _HEADER)
                if (candidate := pattern.match(text, position))
            )
            yield Statement(Kind.DIRECTIVE, match[0].rstrip("; \t\r\n"), line)
            position = match.end()
        elif label := _LABEL.match(text, position):
            yield Statement(Kind.LABEL, label[1], line)
            position = label.end()
        else:
            end = text.find(";", position)
            if end < 0:
                raise cut_off(name, line, f"the instruction {text[position:].strip()[:60]!r} has no end")
            yield Statement(Kind.INSTRUCTION, " ".join(text[position:end].split()), line)
            position = end + 1
    if depth:
        raise cut_off(name, len(ends) + 1, f"{depth} of its scopes are still open at the end")


def cut_off(name: str, line: int, what: str) -> PtxError:
    """Return the error for a text that ends before its statements do."""
    return PtxError(f"the PTX is cut off: {what}", at=f"{name}:{line}", fix=REBUILD)
