"""What a step has room for, where the options do not say it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import llmc
from llmc.codegen.limits import engine_limits
from llmc.errors import OptionError
from llmc.graph.model_graph import ModelInfo
from llmc.options import BuildOptions


@pytest.mark.parametrize(
    ("options", "are_free", "rows"),
    [
        ({}, False, 64),
        ({"max_sequences": 4}, False, 64),
        ({"max_sequences": 100}, False, 100),
        ({"max_sequences": 32}, True, 288),
        ({"max_sequences": 32, "speculative": "mtp"}, False, 288),
        ({"max_sequences": 32, "speculative": "mtp", "max_batch_tokens": 64}, False, 64),
        ({"max_sequences": 32, "speculative": "mtp", "max_logit_rows": 40}, True, 40),
    ],
)
def test_rows_of_logits_are_for_all_sequences_and_for_drafts(
    options: dict[str, Any], are_free: bool, rows: int
) -> None:
    info = ModelInfo("model", "module", 97, 4096, torch.float32)
    assert engine_limits(info, BuildOptions(**options), rows_are_free=are_free).max_logit_rows == rows


class Begun:
    """The stages of a build that have begun."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, name: str, total: int | None) -> None:
        self.stages.append(name)

    def advance(self, amount: int) -> None:
        pass


def test_too_long_sequences_are_refused_before_any_weight_is_read(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    begun = Begun()
    with pytest.raises(OptionError, match="max_model_len is 321, but the model has 320 positions"):
        llmc.build(
            checkpoint_of("llama"), tmp_path / "engine.llmc", target="reference", max_model_len=321, progress=begun
        )
    assert begun.stages == ["capture"]
