"""A model that is cut for two ranks, bisected: the rewrite is found, and shown by itself on both ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import llmc
from tests.conftest import DRAFT


@pytest.mark.slow
def test_bisect_and_diff_with_two_ranks(tmp_path: Path) -> None:
    ranks = ("--tensor-parallel-size", "2", "--dtype", "float32", "--length", "16")
    outcome = llmc("bisect", DRAFT, *ranks, "--check", "! grep -q all_reduce {graph}", "-o", tmp_path / "found")
    assert "of pass partition: cut 128 elements of model_layers_0_self_attn_q_proj_weight" in outcome.out
    assert "does not run" not in outcome.out
    repro = subprocess.run([sys.executable, tmp_path / "found" / "repro.py"], capture_output=True, text=True)
    assert repro.returncode == 0 and repro.stdout.endswith("ok\n") and repro.stdout.startswith("add_"), repro.stderr
    compared = llmc("diff", DRAFT, *ranks)
    assert "partition" in compared.out and "every pass stays within its numerics class" in compared.out
