"""What llmc exports it reads again, and makes the same graph of it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.exporter import export
from llmc.frontends.capture import capture
from llmc.graph.render import render
from llmc.options import BuildOptions
from llmc.passes.pipeline import canonical
from llmc.passes.runner import run_pipeline
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_tokens

_CASES = [(family, stage) for family in ("llama", "gemma2", "gpt2", "mixtral") for stage in ("captured", "canonical")]


def _canonical_text(place: Path) -> list[str]:
    """Of the canonical graph, all values numbered, weights too, which an export computes and calls as its nodes;
    arguments that are what they are by default left out."""
    graph = run_pipeline(capture(place, BuildOptions()).graph, canonical(), BuildOptions()).graph
    weights = {node.name for node in graph.weight_nodes()}
    numbers: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        return numbers.setdefault(found[1], f"%{len(numbers)}")

    lines = [line for line in render(graph).splitlines() if line.lstrip("%").split(":")[0] not in weights]
    return [re.sub(r"(, None)+\)", ")", re.sub(r"%([\w.]+)", numbered, line)) for line in lines[1:]]


@pytest.mark.parametrize(("family", "stage"), quick_sample(_CASES, [("llama", "canonical")]))
def test_the_canonical_graph_is_the_same(family: str, stage: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path / "model")
    again = tmp_path / "again"
    export(checkpoint, again, stage=stage)
    assert _canonical_text(again) == _canonical_text(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "stage"), _CASES)
def test_and_so_are_its_logits(family: str, stage: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path / "model")
    again = tmp_path / "again"
    export(checkpoint, again, stage=stage)
    tokens = tiny_tokens(20)
    with (
        llmc.compile(checkpoint, target="reference") as first,
        llmc.compile(again, target="reference") as second,
    ):
        actual, expected = (np.asarray(engine.logits(tokens)) for engine in (second, first))
    # To the bit; but of experts, whose products round otherwise.
    tolerance = 1e-5 * float(expected.std()) if family == "mixtral" else 0.0
    assert np.abs(actual - expected).max() <= tolerance
