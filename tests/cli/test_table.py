"""Tables at every width: columns leave in their order, words stay whole, and what a file gets is complete."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from llmc.cli.table import Column, FittingTable, facts
from tests.cli.command import MODEL, llmc

UNITS = {"µs", "ms", "s", "B", "kB", "MB", "GB"}


def printed(table: FittingTable, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return file.getvalue()


def table_of_four() -> FittingTable:
    columns = (
        Column("kernel"),
        Column("registers", rank=2, right=True),
        Column("share", rank=1, right=True),
        Column("what it does", rank=3, wraps=True),
    )
    table = FittingTable("kernels of a step", columns)
    table.add_row("paged_prefill_kernel.0", "174", "12.5%", "attends to the blocks of a prompt, chunk by chunk")
    table.add_section()
    table.add_row("all", "", "100%", "")
    return table


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (200, None),
        (78, None),
        (60, "what it does"),
        (45, "registers, what it does"),
        (30, "registers, share, what it does"),
    ],
)
def test_columns_leave_by_rank(width: int, left_out: str | None) -> None:
    text = printed(table_of_four(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "paged_prefill_kernel.0" in text
    note = re.search(r"left out at \d+ columns: (.*)", " ".join(text.split()))
    assert (note and note[1]) == left_out


def test_text_wraps_between_words_and_only_a_name_that_is_wider_than_the_terminal_is_folded() -> None:
    lines = printed(table_of_four(), 78).splitlines()
    cells = [line.split("│")[4].strip() for line in lines if line.count("│") == 5]
    assert " ".join(cells).split() == ["attends", "to", "the", "blocks", "of", "a", "prompt,", "chunk", "by", "chunk"]
    folded = printed(table_of_four(), 20)
    assert max(map(len, folded.splitlines())) <= 20
    assert "paged_prefill_kernel.0" in re.sub(r"[\s│]", "", folded)


def test_facts_have_no_header() -> None:
    table = facts("engine")
    table.add_row("size", "13 MB")
    lines = printed(table, 40).splitlines()
    assert [line for line in lines if "│" in line] == ["│ size │ 13 MB │"]


def test_cells_are_no_markup() -> None:
    table = facts("[bold]title")
    table.add_row("path", "models/[red]x")
    table.add_row("state", Text("[ok]", style="green"))
    for part in ("[bold]title", "models/[red]x", "[ok]"):
        assert part in printed(table, 80)


def words_of(text: str) -> set[str]:
    """Its words without numbers, which differ from run to run, and without what says which columns are left out."""
    text = re.sub(r"left out at \d+ columns:[^━┏┌│]*", "", text)
    return {word for word in re.split(r"[\s│┃━─┏┓┡┩╇┳┌┐└┘├┤┼┴┬]+", text) if not re.search(r"\d", word)} - UNITS


QUICK: list[tuple[str, ...]] = [
    ("targets",),
    ("passes",),
    ("inspect", "ENGINE", "--weights"),
    ("bench", "latency", "ENGINE", "--input-len", "8", "--output-len", "4", "--iterations", "1", "--warmup", "0"),
    ("bench", "throughput", "ENGINE", "--input-len", "8", "--output-len", "4", "--num-prompts", "1"),
]
SLOW: list[tuple[str, ...]] = [
    ("env",),
    ("passes", "MODEL"),
    ("profile", "ENGINE", "--prefill", "16", "--repeats", "1"),
    ("diff", "MODEL", "--length", "4", "--passes", "fuse_rms_norm"),
    ("verify", "ENGINE", "--against", "MODEL", "--length", "8", "--sequences", "1"),
    ("build", "MODEL", "-o", "OUTPUT", "--target", "reference", "--quantize", "int4", "--force"),
    ("bench", "startup", "ENGINE", "--iterations", "1"),
]


@pytest.mark.parametrize(
    "command",
    [*QUICK, *(pytest.param(command, marks=pytest.mark.slow) for command in SLOW)],
    ids=lambda c: " ".join(c[:2]),
)
def test_every_verb_fits_in_80_columns_without_breaking_a_word(
    command: tuple[str, ...], draft_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"ENGINE": str(draft_engine), "MODEL": str(MODEL), "OUTPUT": str(tmp_path / "engine.llmc")}
    arguments = [paths.get(word, word) for word in command]
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = llmc(*arguments)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = llmc(*arguments)
    assert (wide.code, narrow.code) == (0, 0), (command, wide, narrow)
    assert "left out" not in wide.out
    too_long = [line for line in narrow.out.splitlines() if len(line) > 80]
    assert not too_long, (command, too_long)
    broken = words_of(narrow.out) - words_of(wide.out)
    # A path is one word, which only the terminal's edge may break.
    assert not {word for word in broken if not any(word in path for path in paths.values())}, (command, broken)
