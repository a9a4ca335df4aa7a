"""The checker of docstrings, messages and pages finds what each of its patterns is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.check_english import CHECKED, findings, paragraphs
from docs.english_patterns import PATTERNS, EnglishPattern
from tests.documentation import ROOT


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_pattern_finds_its_example(pattern: EnglishPattern, tmp_path: Path) -> None:
    if pattern.only_functions or pattern.only_docstrings:
        (tmp_path / "source.py").write_text(f'def f() -> None:\n    """{pattern.example}"""\n')
    else:
        (tmp_path / "page.md").write_text(f"# A page\n\nAll is well here. {pattern.example}\n")
    assert pattern.name in {finding.pattern.name for finding in findings([tmp_path])}


@pytest.mark.parametrize(
    "pattern", [pattern for pattern in PATTERNS if pattern.allowed], ids=lambda pattern: pattern.name
)
def test_a_pattern_leaves_plain_english(pattern: EnglishPattern) -> None:
    assert pattern.allowed is not None and pattern.pattern.search(pattern.allowed) is None


def test_the_package_and_its_documentation_are_plain_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert [str(finding) for finding in findings(Path(checked) for checked in CHECKED)] == []


def test_prose_of_a_source_is_its_comments_docstrings_and_messages(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        '"""First line.\n\nA second\nparagraph.\n"""\n\n# A comment\n# of two lines.\nNAME = "one word"\n'
        'raise ValueError(f"the file {NAME} has no "\n    "header")\nTEMPLATE = """\nWhat a kernel is.\n"""\n'
    )
    assert [(p.line, p.text) for p in paragraphs(source)] == [
        (7, "A comment of two lines."),
        (1, "First line."),
        (3, "A second paragraph."),
        (10, "the file `x` has no header"),
    ]


def test_docstrings_of_gpu_kernels_may_begin_with_a_fragment(tmp_path: Path) -> None:
    """Engines for GPUs hold their source."""
    source = tmp_path / "source.py"
    source.write_text(
        '@triton.jit\ndef kernel():\n    """How many rows."""\n\n\ndef rows():\n    """How many rows."""\n'
    )
    assert [finding.line for finding in findings([source])] == [7]


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p.only_docstrings], ids=lambda pattern: pattern.name)
def test_a_pattern_of_docstrings_skips_comments_and_kernels(pattern: EnglishPattern, tmp_path: Path) -> None:
    """Engines hold the sources of kernels."""
    source = f'# {pattern.example}\ndef f() -> None:\n    """{pattern.example}"""\n'
    for folder in ("kernels", "passes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "source.py").write_text(source)
    assert [(finding.path.parent.name, finding.line) for finding in findings([tmp_path])] == [("passes", 3)]


def test_code_of_a_page_is_not_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A table:\n\n| a | nobody |\n|---|---|\n\n```\nnobody\n```\n\n    nobody\n\nSee `nobody`.\n")
    (finding,) = findings([page])
    assert (finding.line, finding.pattern.name) == (3, "code as a person")
