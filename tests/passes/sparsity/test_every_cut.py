"""Builds that make zeros or take parts of the model out can be cut after every rewrite: each graph on the way runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.graph.execute import run_tokens
from llmc.passes.pipeline import default
from tests.family_captures import FamilyCaptures
from tests.passes.pruning.pruned_models import calibration, pruned
from tests.tiny_models import tiny_tokens

TOKENS = tiny_tokens(13)
LOSSY = ("drop_layers", "prune_heads", "low_rank_values", "prune_channels", "sparsify", "quantize_weights")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "last"),
    [
        ({"sparsity": "magnitude:0.5"}, "sparsify"),
        ({"sparsity": "sparsegpt:2:4", "quantize": "int8"}, "quantize_weights"),
        ({"prune": "channels=0.25,heads=0.5,layers=1"}, "prune_channels"),
        ({"prune": "values=0.5"}, "low_rank_values"),
    ],
)
def test_every_cut_runs(captured_family: FamilyCaptures, given: dict[str, Any], last: str, tmp_path: Path) -> None:
    """From the last rewrite on that changes numbers on purpose, all cuts compute the same."""
    family, text = captured_family("llama"), calibration(tmp_path)
    options: dict[str, Any] = {"prune": "", "calibration": text, "calibration_sequences": 2, **given}
    whole = pruned(family, passes=default(), **options)
    expected = run_tokens(whole.graph, family.captured.source, TOKENS)
    numbers = {record.name: [rewrite.number for rewrite in record.rewrites] for record in whole.records}
    names = [record.name for record in whole.records]
    changing = [name for name in LOSSY if numbers.get(name)]
    first = min(number for name in changing for number in numbers[name])
    assert names.index(last) == max(names.index(name) for name in changing)
    for stop in range(first - 1, sum(map(len, numbers.values()))):
        graph = pruned(family, passes=default(), stop_after=stop, **options).graph
        logits = run_tokens(graph, family.captured.source, TOKENS)
        assert logits.isfinite().all(), stop
        if stop >= max(numbers[last]):
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3, msg=f"cut after #{stop}")
