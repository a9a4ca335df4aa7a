"""What a new product takes: two files and a line, and it works with every storage, pass and report.

The files are in the folder squared_linear/; the line is written into a copy of the package, which a process of its own
runs. tests/passes/test_new_product.py has the passes alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.package_copy import Line, changes, copied_package, run_with
from tests.codegen.squared_linear import every_storage

FILES = {"op.py": "ops/squared_linear.py", "kernel.py": "codegen/triton/kernels/products/squared_linear.py"}
LINES = (
    Line(
        "codegen/cpp/kernel_table.py",
        "KERNELS: dict[Any, Kernel] = {",
        '    _llmc.squared_linear.default: product("linear", more=lambda call: {"activation": "relu2"}),',
    ),
)


@pytest.mark.slow
def test_two_files_and_a_line_are_a_new_product(tmp_path: Path, own_cache: Path) -> None:
    copy = copied_package(tmp_path, Path(every_storage.__file__).parent, FILES, LINES)
    assert changes(copy, LINES) == (2, 1)
    # No C++ is new: the kernels may be compiled already.
    done = run_with(copy, "-m", every_storage.__name__, LLMC_CACHE_DIR=str(own_cache))
    assert done.stdout.split() == ["dense", "int4", "w8a8", "sparse"]
