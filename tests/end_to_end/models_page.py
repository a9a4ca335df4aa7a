"""What docs/models.md says of each architecture."""

from __future__ import annotations

import re
from pathlib import Path

from llmc.architectures.tiny_config import architectures

_PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def listed(title: str) -> list[str]:
    """The names in a section of the page, without those of a newer transformers than this."""
    section = _PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    known = dict(architectures())
    return [name for name in re.findall(r"^\| `([\w+-]+)` \|", section, re.MULTILINE) if name in known]
