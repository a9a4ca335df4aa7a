"""A user's own passes after the default ones, and what is no pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import llmc
from llmc.errors import OptionError
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes import GraphPass, Rewrite
from llmc.passes.rewrite_log import RewriteLog
from tests.end_to_end.logits import assert_close, random_tokens, torch_logits
from tests.tiny_models import tiny_model

aten = torch.ops.aten


def _scaled(x: Any, scale: Any) -> Any:
    return aten.mul.Tensor(x, scale)


def _divided(x: Any, scale: Any) -> Any:
    return aten.div.Tensor(x, 1.0 / scale) if isinstance(scale, float) else aten.mul.Tensor(scale, x)


def test_passes_of_a_user_run_after_the_default_ones(checkpoint_of: Callable[..., Path]) -> None:
    seen: list[str] = []

    def look(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
        seen.append(graph.stage.value)

    def constant(match: Any) -> Any:
        return None if isinstance(match.bound["scale"], float) else llmc.passes.Refusal("not a number", match.root)

    divide = Rewrite("divide", (_scaled,), _divided, constant)
    passes = [*llmc.passes.default(), divide, GraphPass("look", look)]
    model = tiny_model("granite")
    with llmc.compile(checkpoint_of("granite"), passes=passes, check_passes=True) as engine:
        tokens = random_tokens(engine.info.vocab_size, 40)
        assert_close(engine.logits(tokens), torch_logits(model, tokens))
        assert "aten.div.Tensor" in next((engine.path / "report" / "graphs").glob("*-divide.txt")).read_text()
    assert seen == ["optimized"]


@pytest.mark.parametrize(("passes", "part"), [(["fuse_rope"], "'fuse_rope' (str)"), ([], "stage captured")])
def test_what_is_no_pipeline_is_refused(
    passes: Any, part: str, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(OptionError) as caught:
        llmc.build(checkpoint_of("llama"), tmp_path / "engine.llmc", passes=passes)
    assert part in caught.value.problem
    assert "llmc.passes.default()" in str(caught.value.fix)
    assert not any(tmp_path.iterdir())


def _norm(x: Any, weight: Any, eps: Any) -> Any:
    return torch.ops.llmc.rms_norm.default(x, weight, eps)


def _weighted_outside(x: Any, weight: Any, eps: Any) -> Any:
    return aten.mul.Tensor(torch.ops.llmc.rms_norm.default(eps=eps, x=x, weight=None), weight)


def test_a_replacement_may_call_ops_with_keywords(checkpoint_of: Callable[..., Path]) -> None:
    def has_weight(match: Any) -> Any:
        return llmc.passes.Refusal("no weight", match.root) if match.bound["weight"] is None else None

    split = Rewrite("split_norm", (_norm,), _weighted_outside, has_weight)
    model = tiny_model("llama", num_hidden_layers=1)
    given = checkpoint_of("llama", num_hidden_layers=1)
    with llmc.compile(given, target="reference", passes=[*llmc.passes.default(), split]) as engine:
        tokens = random_tokens(engine.info.vocab_size, 9)
        assert_close(engine.logits(tokens), torch_logits(model, tokens))
        text = next(engine.path.rglob("*-split_norm.txt")).read_text()
        assert re.search(r"= llmc\.rms_norm\(%\w+, None, 1e-0", text), text
