"""What a new storage of weights takes: two files and a line, and every product works with it on CPUs.

The files are in the folder bitmask/; the line is written into a copy of the package, which a process of its own runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.bitmask import every_product
from tests.codegen.package_copy import Line, changes, copied_package, run_with

FILES = {"bitmask.py": "ops/bitmask.py", "bitmask.cpp": "codegen/cpp/kernels/bitmask.cpp"}
LINES = (
    Line(
        "codegen/cpp/storages.py",
        '        None: Storage("", _panels, _table, dense_refusal),',
        '        _llmc.bitmask.default: rows("bitmask", "mask", "values"),',
    ),
)


@pytest.mark.slow
def test_two_files_and_a_line_are_a_new_storage(tmp_path: Path) -> None:
    copy = copied_package(tmp_path, Path(every_product.__file__).parent, FILES, LINES)
    assert changes(copy, LINES) == (2, 1)
    assert run_with(copy, "-m", every_product.__name__).stdout.split() == ["F32", "BF16"]
