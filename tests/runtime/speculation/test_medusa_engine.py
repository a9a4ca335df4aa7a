"""Engines with heads: the bits of their logits are those of engines without, and heads cost nothing until asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc.engine_format import read_engine
from llmc.errors import CheckpointError
from llmc.graph.execute import Chunk
from llmc.program.step_outputs import DRAFT_IDS, DRAFT_LOGPROBS
from llmc.runtime.executors.executor import SideOutputExecutor
from llmc.runtime.executors.opening import open_executor
from llmc.runtime.executors.opening_request import CacheRoom
from tests.cli.command import assert_user_error
from tests.cli.command import llmc as command
from tests.codegen.triton.device_harness import step_arrays
from tests.conftest import DRAFT
from tests.medusa_heads import medusa_1, vllm

STEP = step_arrays([Chunk(0, 0, (5, 9, 2, 33, 71)), Chunk(1, 0, (8, 9, 3))], 16, 1)
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": "float32"},
    "w4a8": {"quantize": "w4a8", "kv_cache": "int8"},
    "reference": {"target": "reference"},
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "heads.safetensors"
    medusa_1(path, 128, heads=3)
    return path


@pytest.mark.parametrize("form", [f if f == "bf16" else pytest.param(f, marks=pytest.mark.slow) for f in FORMATS])
def test_logits_have_the_bits_of_an_engine_without_heads(form: str, heads: Path, tmp_path: Path) -> None:
    options = {"max_model_len": 64, **FORMATS[form]}
    llmc.build(DRAFT, tmp_path / "plain.llmc", **options)
    llmc.build(DRAFT, tmp_path / "medusa.llmc", speculative=heads, **options)
    plain, _ = open_executor(read_engine(tmp_path / "plain.llmc"), CacheRoom(), 1)
    drafting, _ = open_executor(read_engine(tmp_path / "medusa.llmc"), CacheRoom(), 1)
    expected = plain.step(STEP).copy()
    assert np.array_equal(drafting.step(STEP), expected)
    assert np.array_equal(drafting.step(replace(STEP, sides=(DRAFT_IDS, DRAFT_LOGPROBS))), expected)
    assert isinstance(drafting, SideOutputExecutor)
    ids, logprobs = (drafting.side_output(name) for name in (DRAFT_IDS, DRAFT_LOGPROBS))
    assert ids.shape == logprobs.shape == (8, 3, 10)
    assert (np.diff(logprobs, axis=-1) <= 0).all() and (logprobs[..., 0] < 0).all()
    plain.close()
    drafting.close()


def test_a_step_without_drafts_launches_what_an_engine_without_heads_does(heads: Path, tmp_path: Path) -> None:
    llmc.build(DRAFT, tmp_path / "medusa.llmc", speculative=heads, max_model_len=64)
    launches = read_engine(tmp_path / "medusa.llmc").program.launches
    with_drafts = [x for x in launches if x.runs(tokens=4, logit_rows=4, sides=(DRAFT_IDS, DRAFT_LOGPROBS))]
    without = [x for x in launches if x.runs(tokens=4, logit_rows=4)]
    assert [x.family for x in without].count("lm_head") == [x.family for x in with_drafts].count("lm_head") == 1
    assert not any("medusa" in str(value) for x in without for value in x.arguments.values())
    (product,) = [x for x in with_drafts if x.family == "lm_head"]
    assert str(product.arguments["tokens"]) == "4*L", "one product over the logits' rows and those of three heads"
    (copy,) = [x for x in with_drafts if any(str(value) == "output:logits" for value in x.arguments.values())]
    assert copy not in without


def test_explain_and_passes_know_the_heads(heads: Path) -> None:
    outcome = command("passes", DRAFT, "--speculative", heads)
    assert outcome.code == 0 and "insert_medusa_heads" in outcome.out
    assert "3 heads after lm_head" in command("passes", DRAFT, "--speculative", heads, "--rewrites").out


@pytest.mark.slow
def test_bisection_finds_the_rewrite_that_inserts_heads(heads: Path, tmp_path: Path) -> None:
    outcome = command(
        "bisect", DRAFT, "--speculative", heads, "--check", "! grep -q medusa {graph}", "-o", tmp_path / "found"
    )
    assert outcome.code == 0 and "of pass insert_medusa_heads: 3 heads after lm_head" in outcome.out


def test_heads_of_another_model_and_pickles_are_user_errors(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.safetensors"
    medusa_1(wrong, 64)
    outcome = command("build", DRAFT, "-o", tmp_path / "out.llmc", "--speculative", wrong)
    assert_user_error(outcome, "has shape [64, 64], expected [128, 128]", "llmc train-medusa")
    pickle = tmp_path / "medusa_lm_head.pt"
    torch.save({}, pickle)
    outcome = command("build", DRAFT, "-o", tmp_path / "out.llmc", "--speculative", pickle)
    assert_user_error(outcome, "a pickle file, which llmc does not open", "convert it once")
    with pytest.raises(CheckpointError, match="there are no Medusa heads"):
        llmc.build(DRAFT, tmp_path / "out.llmc", speculative=tmp_path / "nowhere.safetensors")


def test_heads_with_few_tokens_of_their_own(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    own = [torch.randn(40, 128, generator=generator) for _ in range(2)]
    token_map = torch.randperm(4096, generator=generator)[:40]
    file = tmp_path / "heads.safetensors"
    vllm(file, 128, outputs=own, token_map=token_map)
    llmc.build(DRAFT, tmp_path / "medusa.llmc", speculative=file, max_model_len=64)
    executor, _ = open_executor(read_engine(tmp_path / "medusa.llmc"), CacheRoom(), 1)
    assert isinstance(executor, SideOutputExecutor)
    executor.step(replace(STEP, sides=(DRAFT_IDS, DRAFT_LOGPROBS)))
    assert set(executor.side_output(DRAFT_IDS).ravel().tolist()) <= set(token_map.tolist())
    executor.close()
