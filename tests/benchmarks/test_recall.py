"""The models that copy do so, and recall tells policies that keep an answer from those that drop it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks.copying_model import copying_model, save_copying_model
from benchmarks.recall import COPYING, NONE, POLICIES, TASKS, Recall, recall, recorded, table
from benchmarks.recall_masks import CHOICES, KVZIP_BY_HEAD, RANDOM
from benchmarks.recall_tasks import copies, haystack, repeats
from benchmarks.train_copying_model import VOCABULARY
from llmc.errors import OptionError


def test_the_model_with_computed_weights_copies_from_anywhere() -> None:
    model, task = copying_model(), copies(1024, 5, 1)
    for (prompt,), (answer,) in zip(task.prompts, task.answers, strict=True):
        with torch.inference_mode():
            said = model(torch.tensor([[*prompt, *answer]])).logits[0].argmax(-1)
        assert said[len(prompt) - 1 : -1].tolist() == list(answer)


SNAPKV = "snapkv:budget={budget},window=16,pool=7,every=16"
LRU = "lru:budget={budget},recent=32,every=16"
H2O = "h2o:budget={budget},recent=32,every=16"
STREAMING = "streaming:budget={budget},sinks=4,every=16"


@pytest.fixture(scope="module")
def recalled() -> Callable[[str, str], Recall]:
    """The recall of a task and a policy, with half of the rows of 512 tokens."""

    @functools.cache
    def measured(task: str, policy: str) -> Recall:
        return recall(COPYING, TASKS[task](512, 4, 4, VOCABULARY), policy, 0.5, "auto", 1)

    return measured


def test_the_trained_model_copies_without_compression(recalled: Callable[[str, str], Recall]) -> None:
    assert recalled("copies", NONE).mean >= 0.98


@pytest.mark.parametrize(("task", "policy"), [("copies", SNAPKV), ("copies", LRU), ("repeats", H2O)])
def test_attention_keeps_what_is_asked_for(task: str, policy: str, recalled: Callable[[str, str], Recall]) -> None:
    """The policies recall at least 20 points more than random and recent rows."""
    for other in (RANDOM, STREAMING):
        assert recalled(task, policy).mean >= recalled(task, other).mean + 0.2


def test_what_is_asked_for_has_occurred_once_or_twice() -> None:
    for task, times in ((copies, 1), (repeats, 2)):
        made = task(192, 3, 4, VOCABULARY)
        for prompts, answers in zip(made.prompts, made.answers, strict=True):
            for prompt, answer in zip(prompts, answers, strict=True):
                piece = (*prompt[-made.asked :], *answer)
                places = [at for at in range(len(prompt)) if prompt[at : at + len(piece)] == piece]
                assert len(prompt) == 192 and len(places) == times
    with pytest.raises(OptionError, match="503 different ones, and the model knows 253"):
        copies(512, 3, 4, 256)


def test_tokens_after_a_wrong_one_do_not_count_where_each_asks_for_the_next() -> None:
    """An engine continues with its own token, and a choice with masks with the right one. Both must count alike."""
    chain = copies(192, 1, 2, VOCABULARY)
    said, wanted = [[1, 2, 3, 4], [9, 2, 3, 4]], [(1, 2, 0, 4), (1, 2, 3, 4)]
    assert chain.share(said, wanted) == 1 / 6
    assert replace(chain, is_chain=False, uncounted=0).share(said, wanted) == 6 / 8


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_of_all_rows_forgets_nothing(choice: str) -> None:
    assert recall(COPYING, copies(192, 3, 2, VOCABULARY), choice, 1.0, "auto", 1).mean == 1.0


def test_kvzip_needs_heads_with_different_numbers_of_rows(tmp_path: Path) -> None:
    """Only one of the two layers of the model with computed weights copies."""
    save_copying_model(tmp_path)
    task = copies(192, 4, 2)
    equal = recall(tmp_path, task, "kvzip:budget={ahead},every=16", 0.5, "auto", 1).mean
    assert recall(tmp_path, task, KVZIP_BY_HEAD, 0.5, "auto", 1).mean >= equal + 0.2


def test_records_are_what_was_measured(tmp_path: Path) -> None:
    file, figures = tmp_path / "record.json", Recall("lru:budget=64", 0.5, "int8", (0.25, 1.0))
    file.write_text(json.dumps({"rows": [asdict(figures)]}))
    assert recorded([file, file]) == [figures, figures]


def test_records_without_a_task_are_of_their_model_s() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu-zen4-2-cores"
    for name, task in (("computed", "copies"), ("smollm2", "needles")):
        assert {each.task for each in recorded([results / f"kv-recall-{name}.json"])} == {task}


def test_a_policy_that_drops_nothing_says_nothing(tmp_path: Path) -> None:
    """triattention keeps prompts unless they are counted; a perfect recall would prove nothing."""
    task, text = copies(192, 2, 2, VOCABULARY), haystack(tmp_path / "text.json", VOCABULARY)
    with pytest.raises(OptionError, match="drops nothing"):
        recall(COPYING, task, "triattention:budget={budget},every=16", 0.5, "auto", 1, text)
    counted = "triattention:budget={budget},recent=32,every=16,pinned=0"
    assert recall(COPYING, task, counted, 0.5, "auto", 1, text).mean < 1.0


def test_a_window_forgets_what_is_outside_of_it(recalled: Callable[[str, str], Recall]) -> None:
    by_depth = recalled("copies", STREAMING).by_depth
    assert by_depth[0] < 0.1 and by_depth[-1] == 1.0


def test_each_policy_has_a_row_of_its_own() -> None:
    rows = [
        *table([Recall(policy.format(budget=64, step=2, ahead=32), 0.5, "auto", (0.25, 0.75)) for policy in POLICIES])
    ]
    assert len(rows) == 2 + len(POLICIES)
    assert rows[-1] == "| `triattention heads=all` | auto | 50% |"
