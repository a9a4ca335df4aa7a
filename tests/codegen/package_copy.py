"""A copy of the package with more in it, and processes that run it."""

from __future__ import annotations

import difflib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import llmc

PACKAGE = Path(llmc.__file__).parent
ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Line:
    """A line to add to a file, right after another one."""

    file: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"a line of {self.file}"


def copied_package(folder: Path, source: Path, files: Mapping[str, str], lines: Sequence[Line]) -> Path:
    """The copy, in a folder of its own. files: of `source`, and where they go in the package."""
    copy = folder / "llmc"
    # With what Python has compiled of it, which goes by the files' times.
    shutil.copytree(PACKAGE, copy)
    for name, place in files.items():
        shutil.copy(source / name, copy / place)
    for line in lines:
        text = (copy / line.file).read_text(encoding="utf-8")
        assert text.count(f"{line.after}\n") == 1, f"{line.file} has no line {line.after!r}"
        (copy / line.file).write_text(text.replace(f"{line.after}\n", f"{line.after}\n{line.text}\n"), encoding="utf-8")
    return copy


def changes(copy: Path, lines: Sequence[Line]) -> tuple[int, int]:
    """Files that only the copy has, and lines that differ."""
    files = [p.relative_to(copy) for p in copy.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    new = [p for p in files if not (PACKAGE / p).exists()]
    edited = 0
    for file in {line.file for line in lines}:
        before, after = ((root / file).read_text(encoding="utf-8").splitlines() for root in (PACKAGE, copy))
        edited += sum(line.startswith(("+ ", "- ")) for line in difflib.ndiff(before, after))
    return len(new), edited


def run_with(copy: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with the copy in the place of the package. Raises CalledProcessError."""
    folder = copy.parent
    path = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin", "LLMC_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=path | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:])
        done.check_returncode()
    return done
