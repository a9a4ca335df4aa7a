"""What a new op with two kernels and a pass takes: four files and three lines, and tests that name what is missing.

The files are in the folder layer_scale/; the lines are written into a copy of the package, for processes of their own.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.codegen import layer_scale
from tests.codegen.layer_scale import both_targets
from tests.codegen.package_copy import ROOT, Line, changes, copied_package, run_with

FILES = {
    "op.py": "ops/layer_scale.py",
    "kernel.cpp": "codegen/cpp/kernels/layer_scale.cpp",
    "kernel.py": "codegen/triton/kernels/rows/layer_scale.py",
    "fuse_layer_scale.py": "passes/fusion/fuse_layer_scale.py",
}
LINES = (
    Line(
        "codegen/cpp/kernel_table.py",
        "KERNELS: dict[Any, Kernel] = {",
        '    _llmc.layer_scale.default: by_name("layer_scale", {"x": "tokens: channels"}),',
    ),
    Line(
        "passes/pipeline.py",
        "from llmc.passes.fusion.fuse_gated_linear import fuse_gated_linear",
        "from llmc.passes.fusion.fuse_layer_scale import fuse_layer_scale",
    ),
    Line("passes/pipeline.py", "        fuse_add_norm,", "        fuse_layer_scale,"),
)
# Where a part that was forgotten is named. The copy is imported before pytest puts the package's folder first.
NAMING = ("tests/ops/test_records.py", "tests/codegen/cpp/test_kernel_table.py", "tests/passes/test_pipeline.py")
NAMED = ("-m", "pytest", "-q", "-p", "llmc", "-p", "no:cacheprovider", *(str(ROOT / test) for test in NAMING))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copied_package(tmp_path, Path(layer_scale.__file__).parent, FILES, LINES)


@pytest.mark.slow
def test_four_files_and_three_lines_are_a_new_op(copy: Path) -> None:
    assert changes(copy, LINES) == (4, 3)
    assert run_with(copy, "-m", both_targets.__name__, TRITON_INTERPRET="1").stdout.split() == ["cpu", "h100"]
    run_with(copy, *NAMED)


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [*FILES.values(), *LINES], ids=str)
def test_what_is_left_out_is_named(left_out: str | Line, copy: Path) -> None:
    if isinstance(left_out, Line):
        text = (copy / left_out.file).read_text(encoding="utf-8")
        (copy / left_out.file).write_text(text.replace(f"{left_out.text}\n", ""), encoding="utf-8")
    else:
        (copy / left_out).unlink()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_with(copy, *NAMED)
    said = failed.value.stdout.splitlines()
    assert any("layer_scale" in line for line in said if line.startswith("E "))
