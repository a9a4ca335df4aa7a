"""The verdicts on llmc's own passes are those of docs/passes.md, and none of them is disproved."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmc
from llmc.debug.prove.verdict import Outcome, prove
from llmc.passes.pipeline import built_in
from llmc.passes.rewrite import Pass, Rewrite

PAGE = Path(llmc.__file__).parent.parent / "docs" / "passes.md"


@pytest.mark.parametrize("each", built_in(), ids=lambda each: each.name)
def test_the_page_has_the_verdict(each: Pass) -> None:
    verdict = prove(each)
    assert verdict.outcome is not Outcome.DISPROVED, verdict
    assert "without examples" not in str(verdict), "give it examples, or say in `unproved` why there are none"
    if isinstance(each, Rewrite):
        assert verdict.outcome in (Outcome.PROVED, Outcome.COMPARED), verdict
    (line,) = (x for x in PAGE.read_text(encoding="utf-8").splitlines() if x.startswith(f"- `{each.name}`: "))
    assert line.endswith(f"; {verdict}"), "run: llmc passes --markdown > docs/passes.md"
