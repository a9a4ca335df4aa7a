"""Weights of GGUF files go into graphs as they are: the same codes and scales, the same logits as the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.scheme_text import parse_scheme
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.frontends.gguf.block_codes import unpack_blocks
from llmc.frontends.gguf.block_types import BLOCK_TYPES, BlockType
from llmc.frontends.gguf.source import GgufSource
from llmc.frontends.open_model import local_model
from llmc.graph.execute import run_tokens
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import canonical, default, quantization
from llmc.passes.quantization.round_weight import round_to_nearest
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.gguf_families import family_model
from tests.gguf_files import SCALES_AT, write_gguf
from tests.tiny_models import tiny_model, tiny_tokens

_TOKENS = tiny_tokens(19)
_WIDE = {"intermediate_size": 128}


def model_in(path: Path, family: str, kind: str, **overrides: Any) -> tuple[Any, dict[str, Tensor]]:
    """A tiny model as a GGUF file; the model with the weights that the file stands for, and those."""
    model = tiny_model(family, **{**_WIDE, **overrides})
    meant = write_gguf(path, model, kind)
    model.load_state_dict(meant, strict=False)
    return model, meant


def optimized(path: Path, **options: Any) -> tuple[Captured, PipelineResult]:
    parsed = parse_options({"dtype": "float32", **options})
    captured = capture(path, parsed)
    return captured, run_pipeline(captured.graph, default(), parsed, data=ModelData(captured.source))


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([_TOKENS])).logits[0]
    return logits


_EXACT = ("Q4_0", "Q8_0", "Q5_0", "Q4_1", "Q5_1", "MXFP4")
_NUMBERS = ("F16", "BF16", "F32")


@pytest.mark.parametrize("kind", [*_EXACT, *_NUMBERS])
def test_numbers_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    _, meant = model_in(path, "llama", kind)
    source = GgufSource(local_model(path))
    assert set(source.names()) == set(meant)
    for name, expected in meant.items():
        assert torch.equal(source.load(name).float(), expected), name


def test_codes_are_those_of_the_file_bit_by_bit(tmp_path: Path) -> None:
    """Of a matrix whose rows are in order, and of Q, whose rows are put back: by weights times scales alone."""
    path = tmp_path / "tiny.gguf"
    model_in(path, "llama", "Q4_0")
    source = GgufSource(local_model(path))
    reader = gguf.GGUFReader(path)
    stored = next(tensor.data for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight")
    blocks = stored.reshape(64, -1, 18)
    name = "model.layers.1.mlp.down_proj.weight"
    scales, codes = source.load(f"{name}::scales"), source.load(f"{name}::codes")
    assert scales.dtype is torch.float16 and codes.dtype is torch.int8
    assert scales.numpy().tobytes() == blocks[..., :2].tobytes()
    low, high = blocks[..., 2:] & 15, blocks[..., 2:] >> 4
    assert (codes.numpy().reshape(64, -1, 32) + 8 == np.concatenate((low, high), -1)).all()


def test_each_weight_is_taken_as_it_is_stored(tmp_path: Path) -> None:
    """A file of many types: codes and numbers."""
    path = tmp_path / "tiny.gguf"
    kinds = {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q5_0", "attn_o": "F16", "gate": "BF16", "up": "Q4_1"}
    model = tiny_model("llama", **_WIDE)
    model.load_state_dict(write_gguf(path, model, "Q8_0", kinds=kinds), strict=False)
    captured, result = optimized(path)
    schemes = {
        "layers.1.self_attn.q_proj": "Q4_0 int4",
        "layers.1.self_attn.k_proj": "Q8_0 int8",
        "layers.1.self_attn.v_proj": "Q5_0 int5",
        "layers.1.mlp.up_proj": "Q4_1",
        "layers.1.mlp.down_proj": "Q8_0 int8",
    }
    by_module = {weight.module.removeprefix("model."): weight for weight in result.graph.quantized}
    assert {name: by_module[name].scheme for name in schemes} == schemes
    assert all(weight.error is None for weight in by_module.values())
    assert by_module["layers.1.self_attn.q_proj"].bits == 4.5 and by_module["layers.1.mlp.up_proj"].bits == 5.0
    logits = run_tokens(result.graph, captured.source, _TOKENS)
    torch.testing.assert_close(logits, logits_of(model), rtol=1e-4, atol=1e-4)


def test_blocks_without_a_format_are_rounded_again(tmp_path: Path) -> None:
    """With the error that it costs."""
    path = tmp_path / "tiny.gguf"
    model = family_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    model.load_state_dict(write_gguf(path, model, "Q8_0", kinds={"up": "IQ3_S"}), strict=False)
    captured, result = optimized(path)
    by_module = {weight.module.removeprefix("model."): weight for weight in result.graph.quantized}
    assert by_module["layers.1.mlp.up_proj"].scheme == "IQ3_S as int5:g32:asym"
    assert by_module["layers.1.mlp.gate_proj"].scheme == "Q8_0 int8"
    error = by_module["layers.1.mlp.up_proj"].error
    assert error is not None and 0.01 < error < 0.1
    logits = run_tokens(result.graph, captured.source, _TOKENS)
    scheme = parse_scheme("int5:g32:asym")
    assert scheme is not None
    close = model.state_dict()
    for name in [name for name in close if ".up_proj." in name]:
        close[name] = round_to_nearest(close[name], scheme).values()
    model.load_state_dict(close)
    torch.testing.assert_close(logits, logits_of(model), rtol=1e-4, atol=1e-4)


_BLOCKED = [kind for kind in BLOCK_TYPES.values() if kind.codes is not None and CODE_FORMATS[kind.codes].is_blocked]


@pytest.mark.parametrize("kind", _BLOCKED, ids=lambda kind: kind.name)
def test_blocks_are_taken_apart_as_ggml_reads_them(kind: BlockType) -> None:
    """Every value of random blocks, whose scales are any finite number."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (5, 1024 // kind.elements, kind.nbytes), dtype=np.uint8)
    first = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind.name, 0)
    assert kind.codes is not None
    for place in range(1 + CODE_FORMATS[kind.codes].has_minimum):
        halves = random.standard_normal(blocks.shape[:2]).astype(np.float16)
        blocks[..., first + 2 * place : first + 2 * place + 2] = halves[..., None].view(np.uint8)
    unpacked = unpack_blocks(torch.from_numpy(blocks.reshape(-1).copy()), kind, 1024)
    expected = gguf.quants.dequantize(blocks.reshape(5, -1), gguf.GGMLQuantizationType(kind.number))
    assert torch.equal(unpacked.values(kind.codes), torch.from_numpy(expected))


# Where other types than those that are written at random have their scale, and Q4_1 and Q5_1 their minimum.
_FLOATS_AT = {**SCALES_AT, "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2), "TQ1_0": (52,)}
_FLOATS_AT |= {"TQ2_0": (64,)}
_SUPER_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}


@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, places in _FLOATS_AT.items() for at in places])
def test_scales_that_are_no_numbers_are_refused(kind: str, at: int, tmp_path: Path) -> None:
    """The error names the tensor, its type, the value and its place, for scales and for the scales of minima."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model("llama", **_SUPER_BLOCKS), "F16", kinds={"ffn_down": kind})
    tensor = next(candidate for candidate in gguf.GGUFReader(path).tensors if candidate.name == "blk.0.ffn_down.weight")
    blocks = tensor.data.reshape(256, -1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1])
    number = float("nan") if at else float("inf")
    blocks = blocks.copy()
    blocks[3, -1, at : at + 2] = np.frombuffer(np.float16(number).tobytes(), np.uint8)
    content = bytearray(path.read_bytes())
    content[tensor.data_offset : tensor.data_offset + blocks.size] = blocks.tobytes()
    path.write_bytes(content)
    source = GgufSource(local_model(path))
    place = f"row 3, block {blocks.shape[1] - 1}"
    message = f"blk.0.ffn_down.weight, of type {kind}, has .* not finite, the first -?{number} in {place}"
    with pytest.raises(CheckpointError, match=message) as caught:
        source.load("model.layers.0.mlp.down_proj.weight")
    assert caught.value.at == str(path), "the user's file, not the link to it in the cache"


_WITHOUT_FORMAT = [kind for kind in BLOCK_TYPES.values() if kind.rounded is not None and kind.codes is None]


def test_blocks_without_a_format_are_rounded_again_and_the_error_is_told(tmp_path: Path) -> None:
    """One matrix of each such type; the numbers that are rounded are those that the gguf package decodes."""
    path, model = tmp_path / "tiny.gguf", tiny_model("llama", **{**_SUPER_BLOCKS, "num_hidden_layers": 2})
    names = ("attn_q", "attn_k", "attn_v", "attn_o", "ffn_gate", "ffn_up", "ffn_down")
    places = [f"{layer}.{name}" for layer in (0, 1) for name in names]
    write_gguf(path, model, "Q8_0", kinds={p: kind.name for p, kind in zip(places, _WITHOUT_FORMAT, strict=False)})
    decoded = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
        if tensor.tensor_type in {kind.number for kind in _WITHOUT_FORMAT}
    }
    captured, result = optimized(path)
    again = {weight.scheme: weight for weight in result.graph.quantized if " as " in weight.scheme}
    assert again.keys() == {f"{kind.name} as {kind.rounded}" for kind in _WITHOUT_FORMAT}
    assert len(again) == len(decoded) == 9
    most = {"int4:g32:asym": 0.12, "int5:g32:asym": 0.06, "int8:g32": 0.01}
    assert {name for name, weight in again.items() if not 0 < (weight.error or 0) < most[name.split()[-1]]} == set()
    (down,) = (weight for weight in again.values() if weight.module.endswith("0.mlp.down_proj"))
    assert torch.equal(captured.source.load(f"{down.module}.weight"), decoded["blk.0.ffn_down.weight"])


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """Matrices in Q4_0, but for one in Q8_0 and one in Q4_1."""
    path = tmp_path_factory.mktemp("gguf") / "q4.gguf"
    write_gguf(path, tiny_model("llama", **_WIDE), "Q4_0", kinds={"0.ffn_down": "Q8_0", "1.ffn_down": "Q4_1"})
    return capture(path, parse_options({"dtype": "float32"}))


_BY_32 = "int8 activations by 32"


@pytest.mark.parametrize(
    ("quantize", "q4_0", "q8_0", "q4_1"),
    [
        ("w8a8:xrow", "Q4_0 int4, int8 activations", "Q8_0 int8, int8 activations", "Q4_1, int8 activations"),
        ("w8a8", f"Q4_0 int4, {_BY_32}", f"Q8_0 int8, {_BY_32}", f"Q4_1, {_BY_32}"),
        ("w4a8:g32:x32", f"Q4_0 int4, {_BY_32}", "w4a8:g32:x32", f"Q4_1, {_BY_32}"),
        ("q4_k", "Q4_0 int4", "q4_k:s128", "Q4_1"),
        ("fp8", "fp8", "fp8", "fp8"),
        ("none", None, None, None),
        ("down_proj=int8", "Q4_0 int4", "Q8_0 int8", "Q4_1"),
        ("up_proj=none", "Q4_0 int4", "Q8_0 int8", "Q4_1"),
    ],
)
def test_what_is_asked_for_goes_before_but_codes_get_no_bits_that_say_nothing(
    q4: Captured, quantize: str, q4_0: str | None, q8_0: str | None, q4_1: str | None
) -> None:
    options = parse_options({"dtype": "float32", "quantize": quantize})
    passes = (*canonical(), *quantization())
    result = run_pipeline(q4.graph, passes, options, data=ModelData(q4.source))
    by_module = {weight.module: weight.scheme for weight in result.graph.quantized}
    seen = [by_module.get(f"model.layers.{place}_proj") for place in ("0.mlp.gate", "0.mlp.down", "1.mlp.down")]
    assert seen == [q4_0, q8_0, q4_1]
    assert ("model.layers.0.mlp.up_proj" in by_module) == ("none" not in quantize)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_codes_of_experts_are_those_of_the_file(family: str, tmp_path: Path) -> None:
    """Of each expert a matrix in the file; one matrix of all of them in the graph."""
    path = tmp_path / "experts.gguf"
    model = family_model(family)
    model.load_state_dict(write_gguf(path, model, "Q4_0", kinds={"0.ffn_down_exps": "Q4_1"}), strict=False)
    captured, result = optimized(path)
    experts = [weight for weight in result.graph.quantized if ".experts." in weight.module]
    assert sorted(weight.scheme for weight in experts) == ["Q4_0 int4"] * 3 + ["Q4_1"]
    down = model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    width = down.shape[1] if family == "gpt_oss" else down.shape[2]
    assert max(weight.rows for weight in experts) == 4 * 2 * width
    options = parse_options({"dtype": "float32", "quantize": "*layers.0.*.experts.*=none"})
    exact = run_pipeline(captured.graph, default(), options, data=ModelData(captured.source))
    logits = run_tokens(exact.graph, captured.source, _TOKENS)
    torch.testing.assert_close(logits, logits_of(model), rtol=1e-4, atol=1e-4)
