"""What a user is told of an ONNX model that is not built: the node, its operator, and what to do."""

from __future__ import annotations

import builtins
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from llmc.errors import CaptureError, CheckpointError, LlmcError
from llmc.frontends.capture import capture
from llmc.frontends.onnx.model import OnnxNode
from llmc.frontends.onnx.own_operators import own_operator
from llmc.options import BuildOptions
from tests.frontends.onnx.graphs import VOCABULARY, attention_layer, cache, decoder, random, saved

_N = helper.make_node


def _refused(model: onnx.ModelProto, folder: Path, match: str) -> LlmcError:
    with pytest.raises(LlmcError, match=match) as raised:
        capture(saved(model, folder), BuildOptions())
    assert raised.value.fix
    return raised.value


def _input(name: str, kind: int, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def test_an_unknown_operator_names_node_operator_and_what_to_do(tmp_path: Path) -> None:
    error = _refused(
        decoder([_N("Wavelet", ["x"], ["y"], name="/layer.0/wave", domain="own.ops")], result="y"),
        tmp_path,
        r"node '/layer.0/wave' \(own.ops::Wavelet\): llmc does not support this operator",
    )
    assert isinstance(error, CaptureError)
    assert error.fix is not None and "docs/onnx.md" in error.fix


def test_a_graph_that_rounds_what_it_computes_with(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"scale": np.asarray(0.1, np.float32), "zero": np.asarray(0, np.int8)}
    nodes = [
        _N("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="round"),
        _N("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    error = _refused(decoder(nodes, tensors, result="y"), tmp_path, "QuantizeLinear")
    assert error.fix is not None and "--quantize int8" in error.fix


def test_an_opset_that_is_too_new(tmp_path: Path) -> None:
    error = _refused(decoder(opset=99), tmp_path, "opset 99 of ai.onnx; llmc reads 7 to 25")
    assert error.fix is not None and "version_converter" in error.fix


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (_input("pixel_values", TensorProto.FLOAT, "b", 3, 8, 8), "takes pictures: it is a vision model"),
        (_input("encoder_hidden_states", TensorProto.FLOAT, "b", "s", 8), "reads an encoder"),
        (_input("token_type_ids", TensorProto.INT64, "b", "s"), "takes token types: it is an encoder"),
        (_input("inputs_embeds", TensorProto.FLOAT, "b", "s", 8), "takes embeddings"),
        (_input("attention_mask", TensorProto.FLOAT, "b", 1, "s", "t"), "a mask .* which may hide anything"),
        (_input("past.key", TensorProto.FLOAT, "b", 2, 128, 8), "of a fixed length"),
        (_input("past.key", TensorProto.FLOAT, "b", 2, "past", "width"), "leaves open"),
        (_input("past_conv.0", TensorProto.FLOAT, "b", 8, 3), "which no decoder of text does"),
        (_input("more_ids", TensorProto.INT64, "b", "s"), "has 2 inputs of token ids"),
    ],
)
def test_inputs_of_other_models(given: onnx.ValueInfoProto, match: str, tmp_path: Path) -> None:
    _refused(decoder(inputs=[given]), tmp_path, match)


def test_an_encoder(tmp_path: Path) -> None:
    model = decoder()
    model.graph.output[0].name = model.graph.node[-1].output[0] = "last_hidden_state"
    _refused(model, tmp_path, "last_hidden_state, no logits: it is an encoder")


def test_logits_of_the_last_token_alone(tmp_path: Path) -> None:
    tensors = {n: np.asarray([v], np.int64) for n, v in (("start", -1), ("end", 2**62), ("axis", 1))}
    node = _N("Slice", ["x", "start", "end", "axis"], ["y"])
    _refused(decoder([node], tensors, result="y"), tmp_path, r"logits of 1 position\(s\), not of every token")


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"causal": 0}, "it is not causal"),
        ({"num_heads": 3}, "does not fit its inputs"),
        ({"do_rotary": "yes"}, "its attribute do_rotary is 'yes'"),
    ],
)
def test_attention_that_is_not_read(attributes: dict[str, Any], match: str, tmp_path: Path) -> None:
    nodes, tensors, inputs = attention_layer(**attributes)
    _refused(decoder(nodes, tensors, inputs=inputs, result="y"), tmp_path, match)


def test_functions_that_call_themselves_end(tmp_path: Path) -> None:
    body = [_N("Again", ["a"], ["b"], domain="own")]
    again = helper.make_function("own", "Again", ["a"], ["b"], body, [helper.make_opsetid("own", 1)])
    _refused(
        decoder([_N("Again", ["x"], ["y"], domain="own")], result="y", functions=[again]), tmp_path, "calls itself"
    )


def test_functions_that_multiply_end(tmp_path: Path) -> None:
    """Twelve functions of ten calls each, each of the next: 10¹² calls of few bytes."""
    functions = []
    for level in range(12):
        names = [f"v{i}" for i in range(11)]
        op = f"F{level + 1}" if level < 11 else "Neg"
        body = [_N(op, [a], [b], domain="own" if level < 11 else "") for a, b in pairwise(names)]
        opsets = [helper.make_opsetid("own", 1), helper.make_opsetid("", 21)]
        functions.append(helper.make_function("own", f"F{level}", ["v0"], ["v10"], body, opsets))
    _refused(
        decoder([_N("F0", ["x"], ["y"], domain="own")], result="y", functions=functions), tmp_path, "make [0-9]+ calls"
    )


def test_numbers_that_would_fill_memory(tmp_path: Path) -> None:
    tensors = {"shape": np.asarray([2**20, 2**20, 2**20], np.int64)}
    nodes = [_N("ConstantOfShape", ["shape"], ["big"], name="big"), _N("Add", ["x", "big"], ["y"])]
    _refused(decoder(nodes, tensors, result="y"), tmp_path, "more than a model does")


def test_a_node_that_reads_what_comes_later(tmp_path: Path) -> None:
    nodes = [_N("Add", ["x", "z"], ["y"], name="early"), _N("Neg", ["x"], ["z"])]
    _refused(decoder(nodes, result="y"), tmp_path, "'early'.* reads 'z', which no earlier node makes")


def test_codes_that_do_not_fit(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"codes": np.zeros((8, 1, 8), np.uint8), "scales": np.ones((8, 1), np.float32)}
    node = _N(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain="com.microsoft",
        K=8,
        N=8,
        bits=4,
        block_size=32,
        name="m",
    )
    error = _refused(decoder([node], tensors, result="y"), tmp_path, "'codes' has 64 elements, a weight .* has 128")
    assert isinstance(error, CheckpointError)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    for content in (b"", b"not a model", b"\x08\x0a"):
        file = tmp_path / "model.onnx"
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="ONNX file"):
            capture(file, BuildOptions())
    with pytest.raises(CheckpointError, match="no such file"):
        capture(tmp_path / "other.onnx", BuildOptions())


def test_a_directory_of_several_files_asks_which(tmp_path: Path) -> None:
    for name in ("first.onnx", "second.onnx"):
        (tmp_path / name).write_bytes(decoder().SerializeToString())
    with pytest.raises(CheckpointError, match=r"holds 2 ONNX files: first.onnx, second.onnx"):
        capture(tmp_path, BuildOptions())


def test_without_a_tokenizer_prompts_are_ids(tmp_path: Path) -> None:
    captured = capture(saved(decoder(), tmp_path), BuildOptions())
    assert captured.tokenizer is None and captured.graph.info.vocab_size == VOCABULARY


def test_what_stands_around_a_folder_called_onnx_describes_it(tmp_path: Path) -> None:
    saved(decoder(), tmp_path / "onnx")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 3, "vocab_size": 20}))
    info = capture(tmp_path, BuildOptions()).graph.info
    assert (info.family, info.eos_token_ids) == ("llama", (3,))


def test_another_dtype_than_the_graphs(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="the graph computes in float32"):
        capture(saved(decoder(), tmp_path), BuildOptions(dtype="bfloat16"))


def test_without_the_onnx_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = saved(decoder(), tmp_path), builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "onnx":
            raise ImportError("No module named 'onnx'")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match="needs the onnx package") as raised:
        capture(file, BuildOptions())
    assert raised.value.fix == 'pip install "llmc-compiler[onnx]"'


def test_a_cache_whose_width_genai_config_says(tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"head_size": 16}}}))
    nodes, tensors, inputs = attention_layer()
    for value in inputs[1:]:
        value.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"
    graph = capture(saved(decoder(nodes, tensors, inputs=inputs, result="y"), tmp_path), BuildOptions()).graph
    assert any(node.target is torch.ops.llmc.attention.default for node in graph.graph.nodes)


def test_a_tensor_of_a_type_that_is_not_read(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].data_type = TensorProto.COMPLEX64

    with pytest.raises(CheckpointError, match="has ONNX type 14, which llmc does not read"):
        capture(saved(decoder(tensors={"more": random(2)}), tmp_path, change), BuildOptions())


def test_a_second_cache_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Inputs that the logits do not need."""
    inputs = [cache("past_key_values.0.key", 2, 8), cache("past_key_values.0.value", 2, 8)]
    assert capture(saved(decoder(inputs=inputs), tmp_path), BuildOptions()).graph.info.vocab_size == VOCABULARY


_NO_OPS = ("from_file", "rand", "resize_", "as_strided", "add.out", "__class__", "set_.source_Storage")


@pytest.mark.parametrize("name", _NO_OPS)
def test_functions_of_atens_names_reach_no_op_but_those_of_graphs(name: str) -> None:
    """aten.from_file opens files."""
    assert own_operator(OnnxNode("", "aten", name, "", (), (), {})) is None
    assert own_operator(OnnxNode("", "aten", "add.Tensor", "", (), (), {})) is torch.ops.aten.add.Tensor
