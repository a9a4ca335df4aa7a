"""The pipeline can be cut after any rewrite: what comes out is legal, runs, and computes the same logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from llmc.debug.check_passes import PassChecker
from llmc.errors import PassError
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.pipeline import default, fusion
from llmc.passes.runner import run_pipeline
from tests.passes.pass_checks import rewrites
from tests.plain_modules import eager_decoder, sdpa_decoder
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_tokens
from tests.tolerances import PASSES

# Largest |Δlogit| over the logits' standard deviation in fp32.
# Ids that the plain modules have too.
TOKENS = [token % 90 for token in tiny_tokens(9)]
PLAIN: dict[str, Callable[[], nn.Module]] = {"plain SDPA": sdpa_decoder, "plain eager": eager_decoder}


# Llama, and families with what it lacks: parallel blocks, post-norms, layer norms, learned positions, split gate and
# up, norms of query and key; and modules with no family.
MODELS = ["llama", "gpt_neox", "gemma2", "gpt2", "phi3", "cohere", "qwen3", "plain SDPA", "plain eager"]


@pytest.mark.parametrize(
    "name",
    quick_sample(MODELS, ("gemma2", "gpt2")),
)
def test_at_some_rewrites(name: str, tmp_path: Path) -> None:
    captured = _one_layer(name, tmp_path)
    total = _rewrites(captured)
    _check(captured, range(3, total, max(total // 6, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_at_every_rewrite(name: str, tmp_path: Path) -> None:
    captured = _one_layer(name, tmp_path)
    _check(captured, range(_rewrites(captured) + 1))


@pytest.mark.parametrize("name", quick_sample(MODELS, ("gemma2", "plain SDPA")))
def test_every_pass_passes_its_own_check(name: str, tmp_path: Path) -> None:
    captured = _one_layer(name, tmp_path)
    checker = PassChecker(captured.graph, captured.source)
    result = run_pipeline(captured.graph, default(), BuildOptions(), checker)
    assert set(checker.differences) == {record.name for record in result.records if record.rewrites}
    assert {"page_kv_cache", "merge_qkv"} <= set(checker.differences) or name in NO_MERGE


# Their query, key and value are one product in the model already.
NO_MERGE = ("gpt2", "gpt_neox", "phi3", "plain SDPA", "plain eager")


@pytest.mark.parametrize(
    "name",
    quick_sample(MODELS, ("plain eager",)),
)
def test_without_any_one_pass(name: str, tmp_path: Path) -> None:
    """Every pass that does something in a model is left out in turn: the same logits, or an error that names it."""
    captured = _one_layer(name, tmp_path)
    wanted = run_tokens(captured.graph, captured.source, TOKENS)
    records = run_pipeline(captured.graph, default(), BuildOptions()).records
    refused = set()
    for left_out in [record.name for record in records if record.rewrites]:
        try:
            graph = _run(captured, BuildOptions(disable_passes=(left_out,)))
        except PassError as error:
            assert left_out in str(error.fix), f"without {left_out}: {error}"
            refused.add(left_out)
            continue
        seen = run_tokens(graph, captured.source, TOKENS)
        difference = float((seen - wanted).abs().max() / wanted.std())
        assert difference <= PASSES, f"without {left_out} the logits differ by {difference:.1e} of their spread"
    assert not refused & {pass_.name for pass_ in fusion()}, "what only saves time may be left out"
    assert len(refused) < len(records)


def _one_layer(name: str, directory: Path) -> Captured:
    if name in PLAIN:
        return capture(PLAIN[name](), BuildOptions())
    layers: dict[str, Any] = {"n_layer": 1} if name == "gpt2" else {"num_hidden_layers": 1}
    return capture(tiny_checkpoint(name, directory, **layers), BuildOptions())


def _check(captured: Captured, numbers: range) -> None:
    wanted = run_tokens(captured.graph, captured.source, TOKENS)
    for number in numbers:
        seen = run_tokens(_run(captured, BuildOptions(stop_after=number)), captured.source, TOKENS)
        difference = float((seen - wanted).abs().max() / wanted.std())
        assert difference <= PASSES, f"after rewrite {number} the logits differ by {difference:.1e} of their spread"


def _run(captured: Captured, options: BuildOptions) -> ModelGraph:
    return run_pipeline(captured.graph, default(), options).graph


def _rewrites(captured: Captured) -> int:
    return rewrites(run_pipeline(captured.graph, default(), BuildOptions()).records)
