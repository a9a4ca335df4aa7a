"""The pipeline can be cut after any rewrite: what comes out is legal, runs, and computes the same logits."""

from __future__ import annotations

import pytest

from llmc.graph.capture import Captured, capture
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from tests.passes.pass_checks import rewrites
from tests.tiny_models import tiny_model, tiny_tokens

# Largest |Δlogit| over the logits' standard deviation in fp32.
TOLERANCE = 1e-4
TOKENS = tiny_tokens(9)


def test_llama_at_every_rewrite() -> None:
    captured = capture(tiny_model("llama", num_hidden_layers=1), BuildOptions())
    _check(captured, range(_rewrites(captured) + 1))


# Families with what llama lacks: parallel blocks, post-norms, layer norms, learned positions, split gate and up.
@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "gpt2", "phi3", "cohere"])
def test_other_families_at_some_rewrites(family: str) -> None:
    one_layer = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    captured = capture(tiny_model(family, **one_layer), BuildOptions())
    total = _rewrites(captured)
    _check(captured, range(3, total, max(total // 6, 1)))


def _check(captured: Captured, numbers: range) -> None:
    wanted = run_tokens(captured.graph, captured.source, TOKENS)
    for number in numbers:
        seen = run_tokens(_run(captured, BuildOptions(stop_after=number)), captured.source, TOKENS)
        difference = float((seen - wanted).abs().max() / wanted.std())
        assert difference <= TOLERANCE, f"after rewrite {number} the logits differ by {difference:.1e} of their spread"


def _run(captured: Captured, options: BuildOptions) -> ModelGraph:
    return run_pipeline(captured.graph, default(), options).graph


def _rewrites(captured: Captured) -> int:
    return rewrites(run_pipeline(captured.graph, default(), BuildOptions()).records)
