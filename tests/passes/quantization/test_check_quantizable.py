"""What cannot be quantized is refused before calibration begins, and a broken tensor by its own name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmc.errors import CheckpointError, OptionError
from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.passes.quantization.check_quantizable import check_quantizable
from llmc.passes.quantization.stream import Stream
from tests.passes.quantization.quantizing import calibration_file, captured_llama, quantized

_INPUT_NORM = "model.layers.0.input_layernorm.weight"
_UP, _LAST = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
_EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run on calibration text."""

    def begin(*_: object) -> None:
        pytest.fail("calibration began")

    monkeypatch.setattr(Stream, "__init__", begin)


def _with(name: str, number: float, at: int = 5) -> Captured:
    """The tiny Llama with one other number."""
    given = captured_llama()
    tensors = {key: given.source.load(key) for key in given.source.names()}
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[at] = number
    return Captured(given.graph, MemorySource(tensors))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", [_UP, _INPUT_NORM, _EMBEDDING, _LAST, "lm_head.weight"])
@pytest.mark.parametrize(
    "scheme", ["int8", "q4_k", "int4-gptq:g32", "int4-awq:g32", "w8a8-smoothquant", "w8a8:static", "auto:5"]
)
def test_names_the_tensor_that_holds_nan(scheme: str, name: str, tmp_path: Path) -> None:
    calibration = calibration_file(tmp_path) if scheme not in ("int8", "q4_k") else None
    with pytest.raises(CheckpointError) as caught:
        quantized(scheme, captured=_with(name, float("nan")), calibration=calibration)
    assert caught.value.problem == f"tensor {name} holds 1 numbers that are NaN or infinite in float32"
    assert caught.value.at == name


@pytest.mark.parametrize("number", [float("inf"), float("-inf")])
def test_names_the_tensor_that_holds_infinity(number: float) -> None:
    with pytest.raises(CheckpointError, match=f"tensor {_UP} holds 1 numbers"):
        quantized("int8", captured=_with(_UP, number, at=-1))


def test_large_numbers_whose_sum_is_infinite_are_none() -> None:
    given = captured_llama()
    tensors = {name: given.source.load(name) for name in given.source.names()}
    tensors[_INPUT_NORM] = torch.full_like(tensors[_INPUT_NORM], 3e38)
    captured = Captured(given.graph, MemorySource(tensors))
    assert quantized("int8", captured=captured, passes=(check_quantizable,)).records[0].rewrites == ()


def test_reads_one_tensor_at_a_time_and_each_once() -> None:
    given, read = captured_llama(), list[str]()

    class Counting(MemorySource):
        """Notes what is read."""

        def load(self, name: str) -> Tensor:
            read.append(name)
            return super().load(name)

    source = Counting({name: given.source.load(name) for name in given.source.names()})
    quantized("int8", captured=Captured(given.graph, source), passes=(check_quantizable,))
    assert sorted(read) == sorted(given.source.names())


def test_reads_nothing_where_nothing_is_quantized() -> None:
    captured = Captured(captured_llama().graph, MemorySource({}))
    assert quantized("none", passes=(check_quantizable,), captured=captured).graph.quantized == ()


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("scheme", ["int4-gptq:g32", "int4-awq:g32", "w8a8:static", "auto:5", "int8"])
def test_refuses_the_groups_of_a_cache_before_calibration(scheme: str, tmp_path: Path) -> None:
    # Weights are not read either: the first would be missing.
    captured = Captured(captured_llama().graph, MemorySource({}))
    with pytest.raises(OptionError, match="keys of layer 0 have 16 channels, which int4:g32 does not divide"):
        quantized(scheme, captured=captured, calibration=calibration_file(tmp_path), kv_cache="int4")


@pytest.mark.parametrize(
    ("scheme", "problem"), [("int4-gptq:g128", "groups of 128"), ("int4-gptq:g32", "no calibration text is given")]
)
def test_refuses_options_before_weights_are_read(scheme: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        quantized(scheme, captured=Captured(captured_llama().graph, MemorySource({})))
