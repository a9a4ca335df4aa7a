"""onnxruntime is asked of every stage and of every cut, and says where it computes something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.codegen.onnx.function_body import Body, Value
from llmc.codegen.onnx.function_table import FUNCTIONS
from llmc.codegen.onnx.functions.rows import rms_norm
from llmc.debug.bisect import Pipeline, bisect, outline
from llmc.debug.memo_run import MemoRun
from llmc.debug.second_opinion import OpinionCheck, stage_opinions
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from tests.cli.command import MODEL, assert_user_error, llmc
from tests.family_captures import FamilyCaptures
from tests.tiny_models import tiny_tokens

pytest.importorskip("onnxruntime", exc_type=ImportError)


@pytest.fixture
def pipeline(captured_family: FamilyCaptures) -> Pipeline:
    return Pipeline(captured_family("llama").captured, default(), BuildOptions())


@pytest.fixture
def wrong_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm whose function forgets what is added under the root."""

    def forgetful(b: Body, x: Value, weight: Value | None, eps: float) -> str:
        return rms_norm(b, x, weight, 0.3)

    table: dict[Any, Any] = {**FUNCTIONS, torch.ops.llmc.rms_norm.default: forgetful}
    monkeypatch.setattr("llmc.codegen.onnx.calls.FUNCTIONS", table)


def test_the_stages_in_which_an_op_is_wrong_differ(pipeline: Pipeline, wrong_norm: None) -> None:
    agreement = {opinion.stage: opinion.difference.within(1e-4) for opinion in stage_opinions(pipeline, tiny_tokens(9))}
    assert agreement == {Stage.CAPTURED: True, Stage.CANONICAL: False, Stage.SERVING: False, Stage.OPTIMIZED: False}


@pytest.mark.slow
def test_bisection_names_the_rewrite_that_makes_the_first_such_op(pipeline: Pipeline, wrong_norm: None) -> None:
    tokens = tuple(tiny_tokens(9))
    runner = MemoRun(pipeline.captured.source, tokens, chunk_sizes=(9,), block_size=16)
    culprit = bisect(outline(pipeline), OpinionCheck(pipeline, runner, 1e-4))
    assert (culprit.pass_name, culprit.bad - culprit.good) == ("fuse_rms_norm", 1)
    assert "onnxruntime differs by" in culprit.outcome.detail


def test_verbs(draft_engine: Path, wrong_norm: None) -> None:
    asked = ("verify", draft_engine, "--against", MODEL, "--oracle", "onnxruntime", "--length", "8", "--sequences", "1")
    told = llmc(*asked)
    assert_user_error(told, "of the canonical graph differ by", "llmc bisect")
    assert "captured" in told.out
    assert_user_error(llmc("verify", draft_engine, "--against", MODEL, "--oracle", "tea"), "'tea' is not an oracle")
    assert_user_error(llmc("bisect", MODEL, "--oracle", "tea"), "'tea' is not an oracle")
    assert_user_error(llmc("bisect", MODEL, "--oracle", "onnxruntime", "--check", "true"), "two checks")


@pytest.mark.slow
def test_what_is_right_is_said_to_be(draft_engine: Path) -> None:
    sample = ("--length", "8", "--sequences", "1")
    told = llmc("verify", draft_engine, "--against", MODEL, "--oracle", "onnxruntime", *sample)
    assert told.code == 0 and "engine against onnxruntime fp32, 8 tokens" in told.out
