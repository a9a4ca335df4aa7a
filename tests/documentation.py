"""The pages of the documentation as tests read them: their commands, their Python, their shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^    [^\n]*\n)+", re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order; they may be indented, as the inside of a block before them."""
    return [text for name, text in _FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `llmc …` command in a page's code, without prompt, comment and the rest of the line."""
    text = page.read_text(encoding="utf-8")
    code = [body for name, body in _FENCE.findall(text) if name not in ("python", "text")]
    code += _INDENTED.findall(_FENCE.sub("", text))
    for line in "\n".join(code).replace("\\\n", " ").splitlines():
        command = line.strip().removeprefix("$ ")
        if command.startswith("llmc "):
            words = shlex.split(command, comments=True)
            ends = [i for i, word in enumerate(words) if word in ("&", "|", "&&", ">", ";")]
            yield words[1 : ends[0] if ends else None]
