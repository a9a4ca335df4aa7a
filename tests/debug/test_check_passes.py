"""Checking every pass against the logits before it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from llmc.debug.check_passes import PassChecker
from llmc.errors import PassError
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.pipeline import fusion, serving
from llmc.passes.rewrite import Numerics, Rewrite
from llmc.passes.runner import run_pipeline
from tests.graph_builder import llama


def _norm(x: Any, weight: Any, eps: Any) -> Any:
    return torch.ops.llmc.rms_norm.default(x, weight, eps)


def _wrong_norm(x: Any, weight: Any, eps: float) -> Any:
    return torch.ops.llmc.layer_norm.default(x, weight, None, eps)


WRONG = Rewrite("wrong_norm", (_norm,), _wrong_norm, None, Numerics.REORDER, Stage.CANONICAL)


def test_the_pipeline_passes_its_own_check() -> None:
    graph, source = llama()
    checker = PassChecker(graph, source)
    run_pipeline(graph, (*serving(), *fusion()), BuildOptions(), checker)
    assert "page_kv_cache" in checker.differences
    assert max(checker.differences.values()) < 1e-4


def test_a_pass_that_changes_the_logits_is_named() -> None:
    graph, source = llama()
    checker = PassChecker(graph, source, tokens=[3, 1, 4, 1, 5])
    with pytest.raises(PassError, match=r"pass wrong_norm changes the logits by .* reorder allows 1e-04") as error:
        run_pipeline(graph, (WRONG, *serving()), BuildOptions(), checker)
    assert error.value.at == "rewrites #1 to #5"


def test_logits_that_are_not_numbers_are_over_every_budget() -> None:
    graph, source = llama()
    nan = dataclasses.replace(WRONG, name="nan", replacement=lambda x, weight: _norm(x, weight, float("nan")))
    checker = PassChecker(graph, source)
    once = dataclasses.replace(nan, precondition=None, patterns=(lambda x, weight: _norm(x, weight, 1e-5),))
    with pytest.raises(PassError, match="pass nan changes the logits by nan"):
        run_pipeline(graph, (once,), BuildOptions(), checker)
