"""Weights that read the same input are swept together, and get the codes that they would get apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmc.formats.schemes import Scheme
from llmc.passes.quantization import gptq_products
from llmc.passes.quantization.column_sweep import Solver
from llmc.passes.quantization.gptq import gptq
from llmc.passes.quantization.round_weight import RoundedWeight
from tests.passes.quantization.quantizing import calibration_file, logits, quantized
from tests.passes.quantization.test_round_experts import captured_mixtral

_LAYERS = 2


@pytest.mark.parametrize("scheme", ["int4-gptq:g32:asym", "w4a8-gptq:g32:x32"])
def test_codes_are_those_of_sweeps_apart(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int] = []

    def counted(weight: Tensor, solver: Solver, scheme: Scheme, kept: Tensor | None) -> RoundedWeight:
        swept.append(len(weight))
        return gptq(weight, solver, scheme, kept)

    def run() -> Tensor:
        swept.clear()
        return logits(quantized(scheme, calibration=calibration_file(tmp_path)).graph)

    monkeypatch.setattr(gptq_products, "gptq", counted)
    together = run()
    assert len(swept) == 4 * _LAYERS, "Q, K and V; the output; gate and up; down"
    monkeypatch.setattr(gptq_products, "_MOST_ROWS", 0)
    apart = run()
    assert len(swept) == 7 * _LAYERS
    torch.testing.assert_close(together, apart, rtol=0, atol=0)


def test_experts_are_rounded_by_their_own_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router reads what experts read, and is swept without them."""
    swept: list[int] = []

    def counted(weight: Tensor, solver: Solver, scheme: Scheme, kept: Tensor | None) -> RoundedWeight:
        swept.append(len(weight))
        return gptq(weight, solver, scheme, kept)

    monkeypatch.setattr(gptq_products, "gptq", counted)
    result = quantized("int4-gptq:g32", captured=captured_mixtral(), calibration=calibration_file(tmp_path))
    rounded = [weight for weight in result.graph.quantized if "gptq" in weight.scheme]
    assert any("experts" in weight.module for weight in rounded)
    assert sum(swept) == sum(weight.rows for weight in rounded if "experts" not in weight.module)
