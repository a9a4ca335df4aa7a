"""The model with computed weights copies, and recall tells policies that keep what is asked for from those that do
not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.copying_model import copying_model, save_copying_model
from benchmarks.recall import NONE, POLICIES, Recall, recall, recorded, table
from benchmarks.recall_masks import CHOICES, KVZIP_BY_HEAD, RANDOM
from benchmarks.recall_tasks import copies, haystack
from llmc.errors import OptionError


def test_the_model_copies_from_anywhere() -> None:
    model, task = copying_model(), copies(1024, 5, 1)
    for (prompt,), (answer,) in zip(task.prompts, task.answers, strict=True):
        with torch.inference_mode():
            said = model(torch.tensor([[*prompt, *answer]])).logits[0].argmax(-1)
        assert said[len(prompt) - 1 : -1].tolist() == list(answer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("copying")
    save_copying_model(path)
    return path


@pytest.mark.parametrize(
    "policy", ["snapkv:budget={budget},window=16,pool=7,every=16", "lru:budget={budget},recent=32,every=16"]
)
def test_attention_keeps_what_is_asked_for(policy: str, model: Path) -> None:
    """By 20 points and more over random rows, at half of the rows."""
    task = copies(192, 4, 4)
    assert recall(model, task, NONE, 1.0, "auto", 1).mean == 1.0
    by_chance = recall(model, task, RANDOM, 0.5, "auto", 1).mean
    assert recall(model, task, policy, 0.5, "auto", 1).mean >= by_chance + 0.2


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_of_all_rows_forgets_nothing(choice: str, model: Path) -> None:
    assert recall(model, copies(192, 3, 2), choice, 1.0, "auto", 1).mean == 1.0


def test_kvzip_needs_heads_with_different_numbers_of_rows(model: Path) -> None:
    task = copies(192, 4, 2)
    equal = recall(model, task, "kvzip:budget={ahead},every=16", 0.5, "auto", 1).mean
    assert recall(model, task, KVZIP_BY_HEAD, 0.5, "auto", 1).mean >= equal + 0.2


def test_records_are_what_was_measured(tmp_path: Path) -> None:
    file, figures = tmp_path / "record.json", Recall("lru:budget=64", 0.5, "int8", (0.25, 1.0))
    file.write_text(json.dumps({"rows": [asdict(figures)]}))
    assert recorded([file, file]) == [figures, figures]


def test_a_policy_that_drops_nothing_says_nothing(model: Path, tmp_path: Path) -> None:
    """triattention keeps prompts unless they are counted; a perfect recall would prove nothing."""
    task, text = copies(192, 2, 2), haystack(tmp_path / "text.json")
    with pytest.raises(OptionError, match="drops nothing"):
        recall(model, task, "triattention:budget={budget},every=16", 0.5, "auto", 1, text)
    counted = "triattention:budget={budget},recent=32,every=16,pinned=0"
    assert recall(model, task, counted, 0.5, "auto", 1, text).mean < 1.0


def test_a_window_forgets_what_is_outside_of_it(model: Path) -> None:
    task = copies(192, 4, 4)
    figures = recall(model, task, "streaming:budget={budget},sinks=4,every=16", 0.5, "auto", 1)
    assert figures.by_depth[0] < 0.1 and figures.by_depth[-1] == 1.0


def test_each_policy_has_a_row_of_its_own() -> None:
    rows = [
        *table([Recall(policy.format(budget=64, step=2, ahead=32), 0.5, "auto", (0.25, 0.75)) for policy in POLICIES])
    ]
    assert len(rows) == 2 + len(POLICIES)
    assert rows[-1] == "| `triattention heads=all` | auto | 50% |"
