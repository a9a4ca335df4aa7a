"""What comes of the shipped models' drafts, which does not depend on a machine's speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speculation_acceptance import EXAMPLES, built, by_size, of_draft_model, with_eagle3, with_heads
from llmc import train_medusa

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def test_the_shipped_pair(directory: Path) -> None:
    figures = of_draft_model(built("bard-6m", directory), built("bard-draft", directory), None)
    assert figures["greedy, k = 4: tokens a step"] >= 2.2
    assert figures["T = 1, invariant: accepted"] >= 0.54
    assert figures["T = 1, rejection: accepted"] >= 0.61


def test_medusa_heads_that_are_trained_as_by_default(directory: Path) -> None:
    """Some minutes on one core: a number of tokens and of epochs, not a time."""
    target = built("bard-6m", directory)
    trained = train_medusa(target, EXAMPLES / "data" / "calibration.txt", directory / "heads" / "bard-6m.safetensors")
    assert all(head.top_1 >= least for head, least in zip(trained.heads, (0.38, 0.28, 0.22), strict=True))
    assert by_size(with_heads(target, directory), {"method": "medusa"}, None, (8,))["speakers; 8"] >= 1.9


def test_trees_of_an_eagle3_draft_bring_more_than_its_chains(directory: Path) -> None:
    engine = with_eagle3(directory)
    for temperature in (0.0, 1.0):
        chains, trees = (
            by_size(engine, {"method": "eagle3", "tree_width": width}, None, (8,), temperature) for width in (1, 4)
        )
        assert trees["held-out text; 8"] > chains["held-out text; 8"] + 0.1
        assert trees["speakers; 8"] > chains["speakers; 8"]
