"""What a new op with two kernels and a pass takes: four files and three lines, and tests that name what is missing.

The files are in the folder layer_scale/; the lines are written into a copy of the package, for processes of their own.
docs/passes.md is made anew.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.codegen.cpp import kernel_table as cpp
from llmc.codegen.triton import kernel_table as triton
from llmc.graph.op_record import RECORDS
from tests.codegen import layer_scale
from tests.codegen.layer_scale import both_targets, page
from tests.codegen.package_copy import ROOT, Line, changes, copied_package, run_with
from tests.ops import test_records

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
        '    _llmc.layer_scale.default: by_name("layer_scale", "x[tokens | channels]"),',
    ),
    Line(
        "passes/pipeline.py",
        "from llmc.passes.fusion.fuse_gated_linear import fuse_gated_linear",
        "from llmc.passes.fusion.fuse_layer_scale import fuse_layer_scale",
    ),
    Line("passes/pipeline.py", "        fuse_add_norm,", "        fuse_layer_scale,"),
)
# Where a part that was forgotten is named, and what else looks at all ops or passes.
NAMING = ("tests/ops/test_records.py", "tests/codegen/cpp/test_kernel_table.py", "tests/passes/test_pipeline.py")
OF_ALL = ("tests/codegen/onnx/test_function_table.py", "tests/report/test_coverage_rules.py")
PAGE = ("tests/passes/test_catalog.py", "tests/debug/prove/test_built_in.py")
# The copy is imported before pytest puts the package's folder first.
PYTEST = ("-q", "-p", "llmc", "-p", "no:cacheprovider")
# Proofs of the other passes do not change.
CHANGED = ("-k", "layer_scale or not test_the_page_has_the_verdict")


def paths(*names: str) -> tuple[str, ...]:
    return tuple(str(ROOT / name) for name in names)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copied_package(tmp_path, Path(layer_scale.__file__).parent, FILES, LINES)


@pytest.mark.parametrize(
    "joined",
    [
        partial(test_records.test_an_op_has_a_kernel_or_a_stated_reason, "cpp", cpp.KERNELS),
        partial(test_records.test_an_op_has_a_kernel_or_a_stated_reason, "triton", triton.KERNELS),
    ],
    ids=["cpp", "triton"],
)
def test_an_op_without_a_kernel_is_named(joined: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the slow ones below do with a copy of the package, with a record alone."""
    joined()
    record = RECORDS[torch.ops.llmc.rms_norm.default]
    unknown: Any = "llmc.layer_scale"
    monkeypatch.setitem(RECORDS, unknown, record)
    with pytest.raises(AssertionError, match=r"llmc\.layer_scale"):
        joined()


@pytest.mark.slow
def test_four_files_and_three_lines_are_a_new_op(copy: Path) -> None:
    assert changes(copy, LINES) == (4, 3)
    run_with(copy, "-m", "pytest", *PYTEST, "-p", page.__name__, *CHANGED, *paths(*NAMING, *OF_ALL, *PAGE))


@pytest.mark.slow
def test_they_compute_the_same_on_both_targets(copy: Path) -> None:
    assert run_with(copy, "-m", both_targets.__name__, TRITON_INTERPRET="1").stdout.split() == ["cpu", "h100"]


@pytest.mark.slow
def test_a_page_that_was_not_made_anew_is_named(copy: Path) -> None:
    shutil.copytree(ROOT / "docs", copy.parent / "docs")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_with(copy, "-m", "pytest", *PYTEST, *paths(PAGE[0]))
    assert "run: llmc passes --markdown > docs/passes.md" in failed.value.stdout


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [*FILES.values(), *LINES], ids=str)
def test_what_is_left_out_is_named(left_out: str | Line, copy: Path) -> None:
    if isinstance(left_out, Line):
        text = (copy / left_out.file).read_text(encoding="utf-8")
        (copy / left_out.file).write_text(text.replace(f"{left_out.text}\n", ""), encoding="utf-8")
    else:
        (copy / left_out).unlink()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_with(copy, "-m", "pytest", *PYTEST, *paths(*NAMING))
    said = failed.value.stdout.splitlines()
    assert any("layer_scale" in line for line in said if line.startswith("E "))
