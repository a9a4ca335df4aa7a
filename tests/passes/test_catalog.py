"""docs/passes.md says what the passes' docstrings say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import llmc
from llmc.passes.catalog import docstring, passes_page
from llmc.passes.pipeline import built_in
from llmc.passes.rewrite import Pass

PAGE = Path(llmc.__file__).parent.parent / "docs" / "passes.md"


def test_the_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    # tests/debug/prove/test_built_in.py holds the verdicts.
    verdicts = dict(re.findall(r"^- `(\w+)`: .*?; (.*)$", text, re.MULTILINE))
    assert text == passes_page(verdicts), "run: llmc passes --markdown > docs/passes.md"


@pytest.mark.parametrize("each", built_in(), ids=lambda each: each.name)
def test_every_pass_says_what_it_does(each: Pass) -> None:
    text = docstring(each)
    assert f"- `{each.name}`: " in PAGE.read_text(encoding="utf-8")
    if each.name not in ("check_canonical", "check_quantizable", "read_sparse"):  # They change nothing.
        assert "→" in text or "->" in text, "before → after is missing"
        assert "Must have:" in text, "what a rewrite needs is missing"
