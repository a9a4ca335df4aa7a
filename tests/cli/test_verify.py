"""What `llmc verify` judges by, and how it says what is allowed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from llmc.cli.table import FittingTable
from llmc.cli.verify import comparison_table, has_experts
from llmc.debug.compare import Comparison, compare
from tests.cli.command import llmc as run

MIXTURE = Path(__file__).parents[2] / "examples" / "models" / "bard-mixture"


def differing(worst: float, middle: float) -> Comparison:
    """Of three tokens whose logits have a spread of one."""
    theirs = np.tile(np.array([[-1.0, 1.0]], np.float32), (3, 1))
    ours = theirs + np.array([[middle], [worst], [0.0]], np.float32)
    return compare(lambda tokens: ours, lambda tokens: theirs, [[0, 1, 0]])


def printed(table: FittingTable) -> str:
    file = io.StringIO()
    Console(width=140, file=file).print(table)
    return file.getvalue()


def test_what_is_allowed_is_not_rounded() -> None:
    shown = printed(comparison_table(differing(worst=0.3, middle=0.1), 0.25, "the model"))
    assert "3.00e-01, too large (≤ 0.25)" in shown and "middle" not in shown


def test_a_mixture_in_16_bits_is_judged_by_the_token_in_the_middle() -> None:
    """A near tie of the router sends a token to another expert where numbers are rounded, which is no fault."""
    shown = printed(comparison_table(differing(worst=0.3, middle=0.1), 0.25, "the model", in_the_middle=True))
    assert "3.00e-01, not judged" in shown and "1.00e-01, ok (≤ 0.25)" in shown
    wrong = printed(comparison_table(differing(worst=0.4, middle=0.3), 0.25, "the model", in_the_middle=True))
    assert "3.00e-01, too large (≤ 0.25)" in wrong


@pytest.mark.parametrize(("model_type", "expected"), [("mixtral", True), ("llama", False)])
def test_engines_say_whether_they_have_experts(model_type: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "engine.llmc"
    llmc.build(tiny_architecture(model_type), path, target="reference", max_model_len=32)
    with llmc.load(path) as engine:
        assert has_experts(engine) is expected


@pytest.mark.slow
def test_the_shipped_mixture_is_right(tmp_path: Path) -> None:
    path = tmp_path / "mixture.llmc"
    assert run("build", MIXTURE, "-o", path).code == 0
    outcome = run("verify", path, "--against", MIXTURE)
    assert outcome.code == 0, outcome.err
    assert "the token in the middle" in outcome.out
