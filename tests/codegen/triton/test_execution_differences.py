"""What is explained of differences between PTX and the interpreter, and that docs/ptx.md says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.codegen.triton.execution_differences import EXPLANATIONS, Differences
from tests.documentation import ROOT

X = torch.linspace(1, 2, 9)


def test_the_documentation_has_every_explanation() -> None:
    text = (ROOT / "docs/ptx.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+_kernel)` \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    assert rows == [(kernel, EXPLANATIONS[kernel].why) for kernel in sorted(EXPLANATIONS)]


def test_what_is_not_explained_fails(tmp_path: Path) -> None:
    differences = Differences(tmp_path / "table.md")
    differences.add("gemv_kernel", {"y": (X, X * (1 + 2**-22))})
    differences.add("sort_pairs_kernel", {"y": (X, X.clone()), "places": (X.int(), X.int())})
    with pytest.raises(AssertionError, match=r"gemv_kernel: y is 16 epsilons of torch\.float32 from the"):
        differences.add("gemv_kernel", {"y": (X, X * (1 + 2**-19))})
    with pytest.raises(AssertionError, match="sort_pairs_kernel: y is 2 epsilons"):
        differences.add("sort_pairs_kernel", {"y": (X, X * (1 + 2**-22))})
    with pytest.raises(AssertionError, match="gemv_kernel: places is not what the interpreter stores"):
        differences.add("gemv_kernel", {"places": (X.int(), X.int() + 1)})
    nan = torch.where(X > 1.5, torch.nan, X)
    with pytest.raises(AssertionError, match="y is inf epsilons"):
        differences.add("gemv_kernel", {"y": (X, nan)})
    differences.add("gemv_kernel", {"y": (nan, nan.clone())})
    first, second = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()[2:]
    assert first == "| `gemv_kernel` | 5 | 1 | inf | 0 | 0 | order of sums; products fused into them |"
    assert second == "| 1 more kernels | 2 | 1 | 0 | 0 | 0 | |"
