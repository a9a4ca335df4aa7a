"""Directories for the time of a task: gone with it, and removed by the next one where their process was killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.errors import EngineFormatError
from llmc.files.scratch_directory import ScratchDirectory

HOLD = """
import os, signal
from llmc.files.scratch_directory import ScratchDirectory
held = ScratchDirectory()
(held.path / "file").write_text("left")
print(held.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_is_gone_with_its_object(tmp_path: Path) -> None:
    with ScratchDirectory(tmp_path) as path:
        (path / "file").write_text("x")
        assert path.parent == tmp_path and path.stat().st_mode & 0o777 == 0o700
    kept = ScratchDirectory(tmp_path)
    kept.cleanup()
    kept.cleanup()
    ScratchDirectory(tmp_path)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", HOLD], env=environ, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = Path(killed.stdout.strip())
    assert (left / "file").is_file()
    with ScratchDirectory(tmp_path) as used, ScratchDirectory(tmp_path) as other:
        assert used != other and used.is_dir() and other.is_dir()
        assert not left.exists()


def test_what_others_have_called_alike_stays(tmp_path: Path) -> None:
    for name in ("llmc.notes", "llmc-tmp", "my.llmc-tmp"):
        (tmp_path / name).mkdir()
    with ScratchDirectory(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"llmc.notes", "llmc-tmp", "my.llmc-tmp"}


def test_a_place_that_cannot_be_written_is_named() -> None:
    with pytest.raises(EngineFormatError, match="cannot write temporary files") as caught:
        ScratchDirectory(Path("/proc"))
    assert "TMPDIR" in str(caught.value.fix)
