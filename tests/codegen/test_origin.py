"""What comments of generated code say of where a launch comes from."""

from __future__ import annotations

import pytest

from llmc.codegen.origin import one_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\n  b\tc", "a b c"),
        ("ends\\", "ends"),
        ("ends \\\\", "ends "),
        ("x" * 160, "x" * 160),
        ("x" * 161, "x" * 160),
    ],
)
def test_any_text_becomes_a_line_that_no_next_one_belongs_to(text: str, line: str) -> None:
    assert one_line(text) == line
