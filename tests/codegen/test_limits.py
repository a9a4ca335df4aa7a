"""What a step has room for, where the options do not say it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmc.codegen.limits import engine_limits
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
