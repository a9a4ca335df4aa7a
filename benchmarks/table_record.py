"""Tables of benchmarks as JSON: their lines of Markdown, with the machine and the date."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path


def record_table(file: Path, about: Mapping[str, str], lines: Sequence[str]) -> None:
    """Keep a table.

    Args:
        file: that is written; its directory is made.
        about: what the table depends on, such as the machine and the model.
        lines: of Markdown.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {**about, "date": date.today().isoformat(), "table": list(lines)}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
