"""What a new storage of weights takes: two files and a line, and every product works with it on CPUs.

The files are in the folder bitmask/; the line is written into a copy of the package, which a process of its own runs.
"""

from __future__ import annotations

import difflib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llmc
from tests.codegen.bitmask import every_product

FILES = {"bitmask.py": "ops/bitmask.py", "bitmask.cpp": "codegen/cpp/kernels/bitmask.cpp"}
# Where each line goes: a file, the line that it follows, the line.
LINES = (
    (
        "codegen/cpp/storages.py",
        '        None: Storage("", _panels, _table, _dense_refusal),',
        '        _llmc.bitmask.default: rows("bitmask", "mask", "values"),',
    ),
)


@pytest.mark.slow
def test_two_files_and_a_line_are_a_new_storage(tmp_path: Path) -> None:
    package, copy = Path(llmc.__file__).parent, tmp_path / "llmc"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, place in FILES.items():
        shutil.copy(Path(__file__).parent / "bitmask" / name, copy / place)
    for name, before, line in LINES:
        text = (copy / name).read_text(encoding="utf-8")
        assert text.count(f"{before}\n") == 1, f"{name} has no line {before!r}"
        (copy / name).write_text(text.replace(f"{before}\n", f"{before}\n{line}\n"), encoding="utf-8")
    assert changes(package, copy) == (len(FILES), len(LINES))
    root = Path(__file__).parent.parent.parent
    check = [sys.executable, "-m", every_product.__name__]
    path = {"PYTHONPATH": f"{tmp_path}:{root}", "PATH": "/usr/bin:/bin", "LLMC_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(check, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["F32", "BF16"]


def changes(package: Path, copy: Path) -> tuple[int, int]:
    """Files that only the copy has, and lines that differ."""
    files = [p.relative_to(copy) for p in copy.rglob("*") if p.is_file()]
    new = [p for p in files if not (package / p).exists()]
    edited = 0
    for each in {Path(name) for name, *_ in LINES}:
        before, after = ((root / each).read_text(encoding="utf-8").splitlines() for root in (package, copy))
        edited += sum(line.startswith(("+ ", "- ")) for line in difflib.ndiff(before, after))
    return len(new), edited
