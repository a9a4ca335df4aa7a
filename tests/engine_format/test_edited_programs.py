"""Whoever may write an engine's files may sign them anew; what he gets is an error or the right answer, no crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_format.edited_programs import answer
from tests.runtime.tiny_engine import write_tiny_engine

ROOT = Path(__file__).parent.parent.parent


def check_edits(engine: Path, count: int, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.engine_format.edited_programs", str(engine), str(count), str(folder)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    expected = json.dumps(answer(engine))
    done = subprocess.run(command, input=expected, capture_output=True, text=True, cwd=ROOT, env=environment)
    *edits, last = done.stdout.splitlines()
    assert done.returncode == 0, f"{[*edits, last][-1]}\n{done.stderr}"
    assert len(edits) == count and 0.5 * count < int(last) < count


def test_edited_programs_of_cpu_engines(draft_engine: Path, tmp_path: Path) -> None:
    check_edits(draft_engine, 120, tmp_path)


@pytest.mark.slow
def test_edited_programs_of_reference_engines(tmp_path: Path) -> None:
    check_edits(write_tiny_engine(tmp_path / "tiny.llmc"), 12, tmp_path)


@pytest.mark.slow
def test_many_more_edited_programs(draft_engine: Path, tmp_path: Path) -> None:
    check_edits(draft_engine, 5000, tmp_path / "cpu")
    check_edits(write_tiny_engine(tmp_path / "tiny.llmc"), 1000, tmp_path / "reference")
