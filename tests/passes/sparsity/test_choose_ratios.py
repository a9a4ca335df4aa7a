"""Zeros that are given out keep their share of all weights and cost no more than the same share in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.errors import OptionError
from llmc.formats.sparsity import parse_sparsity
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.calibration import sequences_and_apart
from llmc.passes.quantization.reference_divergence import Reference
from tests.passes.quantization.quantizing import calibration_file, captured_llama
from tests.passes.sparsity.sparse_graphs import sparse_canonical


@pytest.mark.parametrize("text", ["magnitude:auto:0.5", "wanda:auto:0.6"])
def test_what_is_given_out_diverges_no_more_than_the_same_for_all(text: str, tmp_path: Path) -> None:
    captured = captured_llama()
    given: dict[str, Any] = {"calibration": calibration_file(tmp_path), "calibration_sequences": 12}
    options = parse_options({"calibration_length": 64, **given})
    _, apart = sequences_and_apart(captured.graph, options, ModelData(captured.source))
    reference = Reference(captured.graph, captured.source, apart)
    mixed, same = (sparse_canonical(schemes, **given) for schemes in (text, text.replace(":auto", "")))
    divergences = [reference.divergence(result.graph) for result in (mixed, same)]
    assert divergences[0] < divergences[1]
    elements = sum(weight.rows * weight.columns for weight in mixed.graph.sparse)
    zeros = sum(weight.zeros * weight.rows * weight.columns for weight in mixed.graph.sparse) / elements
    ratio = float(text.rpartition(":")[2])
    assert len(mixed.graph.sparse) == 14 and ratio - 0.002 <= zeros < ratio + 0.02
    assert len({weight.scheme for weight in mixed.graph.sparse}) > 1
    (record,) = (candidate for candidate in mixed.records if candidate.name == "sparsify")
    assert len(record.rewrites) == 14
    assert all(f"KL {divergences[0]:.2e} on held-out text" in rewrite.description for rewrite in record.rewrites)
    assert ["lm_head decides on every token" in r.reason for r in record.refusals] == [True]


def test_rules_take_weights_out_of_it(tmp_path: Path) -> None:
    text = "magnitude:auto:0.5,up_proj=none,down_proj=magnitude:0.3"
    weights = sparse_canonical(text, calibration=calibration_file(tmp_path)).graph.sparse
    assert not [weight for weight in weights if weight.module.endswith("up_proj")]
    assert {weight.scheme for weight in weights if weight.module.endswith("down_proj")} == {"magnitude:0.3"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sparsegpt:auto:1.5", "has no ratio of zeros between 0 and 1"),
        ("sparsegpt:auto:2:4", "has no ratio of zeros between 0 and 1"),
        ("sparsegpt:auto:", "has no ratio of zeros between 0 and 1"),
        ("auto:0.5", "unknown way to choose zeros 'auto'"),
        ("up_proj=wanda:auto:0.5", "distributes zeros among all weights, so it cannot apply to some of them"),
    ],
)
def test_what_is_no_budget_is_an_error_with_a_fix(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem) as raised:
        parse_sparsity(text.split(","))
    assert raised.value.fix


def test_a_budget_takes_text() -> None:
    with pytest.raises(
        OptionError, match=r"sparsity=magnitude:auto:0\.5 needs activations, but no calibration text is given"
    ):
        sparse_canonical("magnitude:auto:0.5")
