"""Each family of operators, captured and run, against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmc.errors import CaptureError
from tests.frontends.onnx.eager import TOKENS, assert_as_onnxruntime, assert_same, captured_logits, onnxruntime_logits
from tests.frontends.onnx.graphs import WIDTH, Array, attention_layer, cache, decoder, mask, random, saved
from tests.quick_sample import quick_sample

_N = helper.make_node
_OTHER = {"other": random(WIDTH, seed=1), "two": np.asarray(2.0, np.float32), "half": np.asarray([0.5], np.float32)}


def _whole(*numbers: int) -> Array:
    return np.asarray(numbers, np.int64)


# Each makes y of x [B, T, 8].
_POINTWISE: dict[str, list[Any]] = {
    "arithmetic": [
        _N("Mul", ["x", "x"], ["a"]),
        _N("Add", ["a", "two"], ["b"]),
        _N("Sqrt", ["b"], ["c"]),
        _N("Reciprocal", ["c"], ["d"]),
        _N("Sub", ["two", "d"], ["e"]),
        _N("Div", ["e", "c"], ["f"]),
        _N("Pow", ["f", "two"], ["g"]),
        _N("Neg", ["g"], ["h"]),
        _N("Max", ["h", "other"], ["i"]),
        _N("Min", ["i", "half"], ["j"]),
        _N("Div", ["half", "c"], ["k"]),
        _N("Sum", ["j", "k", "x"], ["y"]),
    ],
    "functions": [
        _N("Sin", ["x"], ["a"]),
        _N("Cos", ["a"], ["b"]),
        _N("Tanh", ["b"], ["c"]),
        _N("Erf", ["x"], ["d"]),
        _N("Sigmoid", ["x"], ["e"]),
        _N("Exp", ["c"], ["f"]),
        _N("Log", ["f"], ["g"]),
        _N("Softplus", ["x"], ["h"]),
        _N("LeakyRelu", ["x"], ["i"], alpha=0.2),
        _N("Relu", ["x"], ["j"]),
        _N("Abs", ["x"], ["k"]),
        _N("Sum", ["d", "e", "g", "h", "i", "j", "k"], ["y"]),
    ],
    "gelu": [
        _N("Gelu", ["x"], ["a"], approximate="tanh"),
        _N("Gelu", ["x"], ["b"]),
        _N("FastGelu", ["x", "other"], ["c"], domain="com.microsoft"),
        _N("BiasGelu", ["x", "other"], ["d"], domain="com.microsoft"),
        _N("QuickGelu", ["x"], ["e"], domain="com.microsoft"),
        _N("Sum", ["a", "b", "c", "d", "e"], ["y"]),
    ],
    "conditions": [
        _N("Less", ["x", "half"], ["a"]),
        _N("GreaterOrEqual", ["x", "other"], ["b"]),
        _N("And", ["a", "b"], ["c"]),
        _N("Not", ["c"], ["d"]),
        _N("Or", ["d", "a"], ["e"]),
        _N("Where", ["e", "x", "two"], ["f"]),
        _N("Clip", ["f", "low", "high"], ["g"]),
        _N("Cast", ["c"], ["h"], to=TensorProto.FLOAT),
        _N("Add", ["g", "h"], ["y"]),
    ],
}
_SHAPES: dict[str, list[Any]] = {
    "heads": [
        _N("Shape", ["x"], ["shape"]),
        _N("Slice", ["shape", "zero", "two_"], ["front"]),
        _N("Concat", ["front", "minus", "four"], ["sizes"], axis=0),
        _N("Reshape", ["x", "sizes"], ["a"]),
        _N("Transpose", ["a"], ["b"], perm=[0, 2, 1, 3]),
        _N("Transpose", ["b"], ["c"], perm=[0, 2, 1, 3]),
        _N("Reshape", ["c", "joined"], ["y"]),
    ],
    "parts": [
        _N("Split", ["x"], ["a", "b"], axis=-1, num_outputs=2),
        _N("Neg", ["b"], ["c"]),
        _N("Concat", ["c", "a"], ["d"], axis=-1),
        _N("Slice", ["x", "four", "end", "last"], ["e"]),
        _N("Slice", ["x", "zero", "four", "last"], ["f"]),
        _N("Concat", ["e", "f"], ["g"], axis=2),
        _N("Add", ["d", "g"], ["y"]),
    ],
    "lookups": [
        _N("Shape", ["input_ids"], ["shape"]),
        _N("Gather", ["shape", "one_"], ["count"], axis=0),
        _N("Range", ["nought", "count", "single"], ["places"]),
        _N("Gather", ["positions_table", "places"], ["learned"], axis=0),
        _N("Unsqueeze", ["learned", "zero"], ["a"]),
        _N("Add", ["x", "a"], ["y"]),
    ],
    "numbers": [
        _N("Shape", ["x"], ["shape"]),
        _N("Slice", ["shape", "minus", "before", "zero", "minus"], ["backwards"]),
        _N("Gather", ["backwards", "one_"], ["tokens"], axis=0),
        _N("Unsqueeze", ["tokens", "zero"], ["count"]),
        _N("Slice", ["shape", "zero", "two_"], ["front"]),
        _N("ReduceProd", ["front", "zero"], ["product"], keepdims=1),
        _N("Sub", ["product", "count"], ["none"]),
        _N("Max", ["none", "four"], ["four_"]),
        _N("Mul", ["four_", "four"], ["sixteen"]),
        _N("Div", ["sixteen", "two_"], ["eight"]),
        _N("Equal", ["four_", "four"], ["yes"]),
        _N("Where", ["yes", "eight", "count"], ["width"]),
        _N("Concat", ["product", "width", "minus"], ["sizes"], axis=0),
        _N("Reshape", ["x", "sizes"], ["a"]),
        _N("Reshape", ["a", "shape"], ["y"]),
    ],
    "rows": [
        _N("Reshape", ["x", "rows"], ["a"]),
        _N("Gemm", ["a", "weight", "other"], ["b"], transB=1),
        _N("Shape", ["x"], ["shape"]),
        _N("Reshape", ["b", "shape"], ["c"]),
        _N("ReduceMean", ["c", "last"], ["d"], keepdims=1),
        _N("Sub", ["c", "d"], ["e"]),
        _N("ReduceMax", ["e", "last"], ["f"], keepdims=1),
        _N("Softmax", ["e"], ["g"], axis=-1),
        _N("Add", ["g", "f"], ["y"]),
    ],
}
_NUMBERS: dict[str, Array] = {
    **_OTHER,
    "low": np.asarray(-0.3, np.float32),
    "high": np.asarray(0.9, np.float32),
    "zero": _whole(0),
    "one_": np.asarray(1, np.int64),
    "two_": _whole(2),
    "four": _whole(4),
    "minus": _whole(-1),
    "before": _whole(-(2**63) + 1),
    "last": _whole(2),
    "end": _whole(2**63 - 1),
    "joined": _whole(0, 0, WIDTH),
    "rows": _whole(-1, WIDTH),
    "nought": np.asarray(0, np.int64),
    "single": np.asarray(1, np.int64),
    "positions_table": random(32, WIDTH),
    "weight": random(WIDTH, WIDTH, seed=5),
}
_NORMS: dict[str, list[Any]] = {
    "rms": [_N("RMSNormalization", ["x", "other"], ["y"], epsilon=1e-3)],
    "simplified": [_N("SimplifiedLayerNormalization", ["x", "other"], ["y"], axis=-1, epsilon=1e-3)],
    "layer": [_N("LayerNormalization", ["x", "other", "more"], ["y"], epsilon=1e-3)],
    "summed rms": [
        _N(
            "SkipSimplifiedLayerNormalization",
            ["x", "x", "other", "more"],
            ["a", "", "", "b"],
            domain="com.microsoft",
            epsilon=1e-3,
        ),
        _N("Add", ["a", "b"], ["y"]),
    ],
    "summed layer": [
        _N(
            "SkipLayerNormalization",
            ["x", "x", "other", "more", "other"],
            ["a", "", "", "b"],
            domain="com.microsoft",
            epsilon=1e-3,
        ),
        _N("Add", ["a", "b"], ["y"]),
    ],
    "heads": [
        _N("Reshape", ["x", "split"], ["a"]),
        _N("SimplifiedLayerNormalization", ["a", "narrow"], ["b"], axis=-1, epsilon=1e-3),
        _N("Reshape", ["b", "joined"], ["y"]),
    ],
}


def _used(nodes: list[Any], tensors: dict[str, Array]) -> dict[str, Array]:
    names = {name for node in nodes for name in node.input}
    return {name: value for name, value in tensors.items() if name in names}


@pytest.mark.parametrize("name", quick_sample([*_POINTWISE, *_SHAPES], ("conditions", "heads", "numbers")))
def test_elements_and_shapes(name: str, tmp_path: Path) -> None:
    nodes = {**_POINTWISE, **_SHAPES}[name]
    assert_as_onnxruntime(saved(decoder(nodes, _used(nodes, _NUMBERS), result="y"), tmp_path))


@pytest.mark.parametrize("name", quick_sample(_NORMS, ("summed rms", "heads")))
def test_norms_equal_onnxruntime(name: str, tmp_path: Path) -> None:
    tensors = {
        **_OTHER,
        "more": random(WIDTH, seed=2),
        "narrow": random(4, seed=3),
        "split": _whole(0, -1, 4),
        "joined": _whole(0, -1, WIDTH),
    }
    nodes = _NORMS[name]
    opset = 23 if name == "rms" else 21
    assert_as_onnxruntime(saved(decoder(nodes, _used(nodes, tensors), result="y", opset=opset), tmp_path))


@pytest.mark.parametrize(
    "attributes",
    quick_sample(
        [{}, {"softcap": 2.0}, {"rotary_interleaved": 1, "scale": 0.7}, {"smooth_softmax": 1}], [{"softcap": 2.0}]
    ),
)
def test_attention_of_onnxruntime(attributes: dict[str, Any], tmp_path: Path) -> None:
    nodes, tensors, inputs = attention_layer(**attributes)
    assert_as_onnxruntime(saved(decoder(nodes, tensors, inputs=inputs, result="y"), tmp_path))


@pytest.mark.parametrize("window", quick_sample([1, 2, 4], [4]))
def test_a_window_counts_the_token_itself_onnxruntime_25927(window: int, tmp_path: Path) -> None:
    """Until onnxruntime 1.22 a window was one longer."""
    nodes, tensors, inputs = attention_layer(local_window_size=window)
    assert_as_onnxruntime(saved(decoder(nodes, tensors, inputs=inputs, result="y"), tmp_path))


def _projected(heads: int, kv_heads: int, width: int) -> tuple[list[Any], dict[str, Array]]:
    """q, k and v [B, heads, T, width]."""
    nodes: list[Any] = []
    tensors = {"out": random(heads * width, WIDTH), "flat": _whole(0, 0, -1)}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        tensors |= {f"w{name}": random(WIDTH, count * width, seed=ord(name)), f"s{name}": _whole(0, 0, count, width)}
        nodes += [
            _N("MatMul", ["x", f"w{name}"], [f"{name}0"]),
            _N("Reshape", [f"{name}0", f"s{name}"], [f"{name}1"]),
            _N("Transpose", [f"{name}1"], [name], perm=[0, 2, 1, 3]),
        ]
    return nodes, tensors


def _joined() -> list[Any]:
    return [
        _N("Transpose", ["o"], ["o1"], perm=[0, 2, 1, 3]),
        _N("Reshape", ["o1", "flat"], ["o2"]),
        _N("MatMul", ["o2", "out"], ["y"]),
    ]


@pytest.mark.parametrize("has_mask", quick_sample([False, True], [True]))
def test_the_standards_attention(has_mask: bool, tmp_path: Path) -> None:
    nodes, tensors = _projected(4, 2, 4)
    inputs = ["q", "k", "v", *(["bias"] if has_mask else [])]
    if has_mask:
        made, numbers = _causal_bias()
        nodes, tensors = [*nodes, *made], tensors | numbers
    softcap: dict[str, Any] = {} if has_mask else {"softcap": 3.0}
    attention = _N("Attention", inputs, ["o"], is_causal=1, **softcap)
    assert_as_onnxruntime(saved(decoder([*nodes, attention, *_joined()], tensors, result="y", opset=23), tmp_path))


def _causal_bias() -> tuple[list[Any], dict[str, Array]]:
    """[1, 1, T, T]: zero up to each token, minus infinity behind it."""
    nodes = [
        _N("Shape", ["input_ids"], ["length"], start=1),
        _N("Squeeze", ["length"], ["count"]),
        _N("Range", ["nought", "count", "single"], ["columns"]),
        _N("Unsqueeze", ["columns", "last"], ["rows"]),
        _N("LessOrEqual", ["columns", "rows"], ["visible"]),
        _N("Where", ["visible", "seen", "hidden"], ["square"]),
        _N("Unsqueeze", ["square", "front"], ["bias"]),
    ]
    numbers: dict[str, Array] = {
        "nought": np.asarray(0, np.int64),
        "single": np.asarray(1, np.int64),
        "last": _whole(1),
        "front": _whole(0, 1),
        "seen": np.asarray(0.0, np.float32),
        "hidden": np.asarray(-np.inf, np.float32),
    }
    return nodes, numbers


def test_past_without_present_onnxruntime_26262(tmp_path: Path) -> None:
    """onnxruntime runs no Attention that reads a cache and returns none. A whole sequence needs neither."""
    nodes, tensors = _projected(4, 2, 4)
    past = [cache("past_key", 2, 4), cache("past_value", 2, 4)]
    attention = _N("Attention", ["q", "k", "v", "", "past_key", "past_value"], ["o"], is_causal=1)
    plain = _N("Attention", ["q", "k", "v"], ["o"], is_causal=1)
    with_past = decoder([*nodes, attention, *_joined()], tensors, result="y", opset=23, inputs=past)
    without = decoder([*nodes, plain, *_joined()], tensors, result="y", opset=23)
    expected = onnxruntime_logits(saved(without, tmp_path / "without"))
    assert_same(captured_logits(saved(with_past, tmp_path / "with")), expected)


def test_causal_alignment_is_no_question_of_whole_sequences_onnxruntime_29020(tmp_path: Path) -> None:
    """Where there are more keys than queries, CPU and CUDA see different ones: such graphs are refused."""
    nodes, tensors = _projected(2, 2, 4)
    nodes += [_N("Concat", ["k", "k"], ["kk"], axis=2), _N("Concat", ["v", "v"], ["vv"], axis=2)]
    attention = _N("Attention", ["q", "kk", "vv"], ["o"], is_causal=1)
    file = saved(decoder([*nodes, attention, *_joined()], tensors, result="y", opset=23), tmp_path)
    with pytest.raises(CaptureError, match=r"keys for .* queries"):
        captured_logits(file)


def test_multi_head_attention_with_a_bias(tmp_path: Path) -> None:
    tensors = {f"w{n}": random(WIDTH, WIDTH, seed=ord(n)) for n in "qkv"}
    made, numbers = _causal_bias()
    nodes = [*made, *(_N("MatMul", ["x", f"w{n}"], [n]) for n in "qkv")]
    attention = _N("MultiHeadAttention", ["q", "k", "v", "", "", "bias"], ["y"], domain="com.microsoft", num_heads=2)
    assert_as_onnxruntime(saved(decoder([*nodes, attention], tensors | numbers, result="y"), tmp_path))


@pytest.mark.parametrize("domain", quick_sample(["", "com.microsoft"], ["com.microsoft"]))
def test_rotation_by_tables(domain: str, tmp_path: Path) -> None:
    angles = np.arange(32)[:, None] * np.asarray([[1.0, 0.1]])
    tensors = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    order = ["x", "position_ids", "cos", "sin"] if domain else ["x", "cos", "sin", "position_ids"]
    rotation = _N("RotaryEmbedding", order, ["y"], domain=domain, num_heads=2)
    positions = helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch", "tokens"])
    model = decoder([rotation], tensors, inputs=[positions], result="y", opset=23)
    assert_as_onnxruntime(saved(model, tmp_path))


def test_a_function_of_the_models_own_and_a_branch(tmp_path: Path) -> None:
    scaled = helper.make_function(
        "own",
        "Scaled",
        ["a"],
        ["b"],
        [
            _N("Constant", [], ["factor"], value=numpy_helper.from_array(np.asarray(3.0, np.float32))),
            _N("Mul", ["a", "factor"], ["c"]),
            _N("LeakyRelu", ["c"], ["b"]),
        ],
        [helper.make_opsetid("", 21)],
    )
    branches = {
        f"{name}_branch": helper.make_graph(
            [_N(op, ["z", "x"], [f"{name}_y"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)],
        )
        for name, op in (("then", "Add"), ("else", "Mul"))
    }
    setting = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    nodes = [_N("Scaled", ["x"], ["z"], domain="own"), _N("If", ["use_cache_branch"], ["y"], **branches)]
    model = decoder(nodes, result="y", inputs=[setting], functions=[scaled])
    file = saved(model, tmp_path)
    table, head = (numpy_helper.to_array(initializer) for initializer in model.graph.initializer[:2])
    x = table[list(TOKENS)]
    z = np.where(x > 0, 3 * x, 0.01 * 3 * x)
    assert_same(captured_logits(file), (z * x) @ head)


def test_a_mask_of_ones_is_no_mask(tmp_path: Path) -> None:
    nodes = [
        _N("Cast", ["attention_mask"], ["seen"], to=TensorProto.FLOAT),
        _N("Unsqueeze", ["seen", "last"], ["column"]),
        _N("Mul", ["x", "column"], ["y"]),
    ]
    assert_as_onnxruntime(saved(decoder(nodes, {"last": _whole(2)}, inputs=[mask()], result="y"), tmp_path))
