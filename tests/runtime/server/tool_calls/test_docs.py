"""docs/tool-calls.md has every form, with the families that it is of."""

from __future__ import annotations

import re
from pathlib import Path

from llmc.runtime.server.tool_calls.known_forms import FORMS, NAMES

TEXT = (Path(__file__).parents[4] / "docs" / "tool-calls.md").read_text(encoding="utf-8")


def test_the_table_has_every_form() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", TEXT, re.MULTILINE)
    assert dict(rows) == {name: form.families for name, form in FORMS.items()} and len(rows) == len(FORMS)
    others = TEXT[TEXT.index("have other names") :].split("\n")[0]
    assert set(re.findall(r"`([^`]+)`", others)) <= set(NAMES)
