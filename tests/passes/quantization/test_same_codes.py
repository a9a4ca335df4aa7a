"""Calibration that shares runs, sweeps and threads finds the codes and zeros that a plain, slow one finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.graph.weights import evaluate
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.calibration import calibration_sequences
from tests.passes.quantization.plain_calibration import PlainLlama, Weights, plain_awq, plain_smoothquant, plain_zeros
from tests.passes.quantization.quantizing import calibration_file, captured_llama, quantized

_PRODUCTS = 14
_SEQUENCES = 6
# Sums in another order may turn a few codes. On one machine none differs.
_ROUNDED_OTHERWISE = 5e-4


def _plain(tmp_path: Path) -> tuple[PlainLlama, dict[str, Any]]:
    """The plain model with its calibration tokens, and the options of a build on the same ones."""
    options = {"calibration": calibration_file(tmp_path), "calibration_sequences": _SEQUENCES}
    captured = captured_llama()
    given = parse_options({"calibration_length": 64, **options})
    sequences = calibration_sequences(captured.graph, given, ModelData(captured.source))
    assert len(sequences) == _SEQUENCES
    return PlainLlama(captured, sequences), options


def _share_of_others(found: Weights, expected: Weights) -> float:
    """Of all elements of all products' weights, those that are not equal."""
    assert found.keys() == expected.keys() and len(expected) == _PRODUCTS
    different = sum(int((found[name] != expected[name]).sum()) for name in expected)
    return different / sum(tensor.numel() for tensor in expected.values())


@pytest.mark.parametrize(("scheme", "plain"), [("w8a8-smoothquant", plain_smoothquant), ("int4-awq:g32", plain_awq)])
def test_codes_equal_a_plain_implementation(
    scheme: str, plain: Callable[[PlainLlama], Weights], tmp_path: Path
) -> None:
    llama, options = _plain(tmp_path)
    graph, expected = quantized(scheme, **options).graph, plain(llama)
    codes = {name: evaluate(graph.weights[f"{name}_codes"], captured_llama().source).float() for name in expected}
    assert _share_of_others(codes, expected) <= _ROUNDED_OTHERWISE


@pytest.mark.parametrize(("form", "pattern"), [("0.5", None), ("2:4", (2, 4))])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_zeros_equal_a_plain_implementation(
    method: str, form: str, pattern: tuple[int, int] | None, tmp_path: Path
) -> None:
    llama, options = _plain(tmp_path)
    graph, expected = quantized("", sparsity=f"{method}:{form}", **options).graph, plain_zeros(llama, method, pattern)
    zeroed = {name: evaluate(graph.weights[name], captured_llama().source).float() for name in expected}
    kept = [{name: (tensor != 0).float() for name, tensor in weights.items()} for weights in (zeroed, expected)]
    assert _share_of_others(kept[0], kept[1]) <= _ROUNDED_OTHERWISE
    assert all(float((zeroed[name] - expected[name]).norm() / expected[name].norm()) < 0.01 for name in expected)
