"""Mixtures of experts of onnxruntime, of numbers and of codes, against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from llmc.frontends.onnx.source import OnnxSource
from tests.frontends.onnx.eager import assert_as_onnxruntime, assert_same, captured_logits, onnxruntime_logits
from tests.frontends.onnx.graphs import WIDTH, Array, decoder, random, saved
from tests.quick_sample import quick_sample

_EXPERTS, _INNER, _BLOCK = 4, 16, 16
_WIDE = 32  # Codes of a block of 16 do not fit into a row of 8.
_SWIGLU: dict[str, Any] = {
    "activation_type": "swiglu",
    "activation_alpha": 1.7,
    "activation_beta": 1.0,
    "swiglu_limit": 2.0,
}


def _routed(op: str, inputs: list[str], **attributes: Any) -> list[Any]:
    """y = the experts' of x, tokens along one axis."""
    return [
        helper.make_node("MatMul", ["x", "router"], ["scores3"]),
        helper.make_node("Reshape", ["scores3", "rows"], ["scores"]),
        helper.make_node(op, inputs, ["y"], domain="com.microsoft", k=2, **attributes),
    ]


def _tensors(width: int) -> dict[str, Array]:
    return {"router": random(width, _EXPERTS), "rows": np.asarray([-1, _EXPERTS], np.int64)}


@pytest.mark.parametrize(
    "attributes",
    quick_sample(
        [
            {"activation_type": "gelu"},
            {"activation_type": "silu", "normalize_routing_weights": 1},
            {**_SWIGLU, "swiglu_fusion": 1, "normalize_routing_weights": 1},
        ],
        [{**_SWIGLU, "swiglu_fusion": 1, "normalize_routing_weights": 1}],
    ),
)
def test_experts_of_numbers(attributes: dict[str, Any], tmp_path: Path) -> None:
    fused = 2 if "swiglu_fusion" in attributes else 1
    tensors = {
        **_tensors(WIDTH),
        "w1": random(_EXPERTS, fused * _INNER, WIDTH),
        "b1": random(_EXPERTS, fused * _INNER),
        "w2": random(_EXPERTS, WIDTH, _INNER),
        "b2": random(_EXPERTS, WIDTH),
    }
    nodes = _routed("MoE", ["x", "scores", "w1", "b1", "w2", "b2"], **attributes)
    assert_as_onnxruntime(saved(decoder(nodes, tensors, result="y"), tmp_path))


def _codes(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def _coded(bits: int) -> tuple[list[Any], dict[str, Array]]:
    """An op of codes over rows of _WIDE, which x is made to and made of again."""
    packed = 8 // bits
    tensors = {
        **_tensors(_WIDE),
        "up": random(WIDTH, _WIDE),
        "down": random(_WIDE, WIDTH),
        "w1": _codes(_EXPERTS, 2 * _INNER, _WIDE // packed),
        "s1": 0.1 * np.abs(random(_EXPERTS, 2 * _INNER, _WIDE // _BLOCK)),
        "w2": _codes(_EXPERTS, _WIDE, _INNER // packed),
        "s2": 0.1 * np.abs(random(_EXPERTS, _WIDE, _INNER // _BLOCK)),
    }
    inputs = ["z", "scores", "w1", "s1", "", "w2", "s2"]
    nodes = _routed(
        "QMoE",
        inputs,
        **{**_SWIGLU, "swiglu_fusion": 1, "expert_weight_bits": bits, "block_size": _BLOCK},
        normalize_routing_weights=1,
    )
    nodes[0].input[0], nodes[-1].output[0] = "z", "q"
    first = helper.make_node("MatMul", ["x", "up"], ["z"])
    return [first, *nodes, helper.make_node("MatMul", ["q", "down"], ["y"])], tensors


def _numbers(codes: Array, scales: Array, bits: int) -> Array:
    """[experts, out, in]: what unsigned codes around the middle stand for."""
    unsigned = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], -1) if bits == 4 else codes
    numbers: Array = (unsigned - float(1 << (bits - 1))) * np.repeat(scales, _BLOCK, -1)
    return numbers.astype(np.float32)


@pytest.mark.parametrize("bits", quick_sample([4, 8], [4]))
def test_experts_of_codes(bits: int, tmp_path: Path) -> None:
    """Against MoE of the numbers that they are: onnxruntime rounds what it multiplies with codes of 8 bits."""
    nodes, tensors = _coded(bits)
    file = saved(decoder(nodes, tensors, result="y"), tmp_path / "codes")
    for name in ("1", "2"):
        tensors[f"w{name}"] = _numbers(tensors[f"w{name}"], tensors.pop(f"s{name}"), bits)
    nodes[-2] = helper.make_node(
        "MoE",
        ["z", "scores", "w1", "", "w2"],
        ["q"],
        domain="com.microsoft",
        k=2,
        normalize_routing_weights=1,
        swiglu_fusion=1,
        **_SWIGLU,
    )
    assert_same(captured_logits(file), onnxruntime_logits(saved(decoder(nodes, tensors, result="y"), tmp_path)))


def test_codes_of_experts_are_the_files(tmp_path: Path) -> None:
    nodes, tensors = _coded(4)
    source = OnnxSource(saved(decoder(nodes, tensors, result="y"), tmp_path))
    codes = tensors["w1"].reshape(_EXPERTS * 2 * _INNER, -1)
    unsigned = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    assert np.array_equal(source.load("w1::codes").numpy(), unsigned.astype(np.int16) - 8)
    assert np.array_equal(source.load("w1::scales").numpy(), tensors["s1"].reshape(len(codes), -1))
