"""Codes of a GGUF file that llmc exported and reads again: the same parts, bit by bit, and the same graph's logits."""

from __future__ import annotations

from pathlib import Path
from shutil import copy

import onnx
import pytest
import torch

from llmc.api.build_stages import Stages
from llmc.codegen.onnx.model_files import write_model_files
from llmc.debug.onnx_oracle import nothing
from llmc.errors import CheckpointError
from llmc.exporter import graph_at
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import run_tokens
from llmc.graph.stage import Stage
from llmc.graph.stored_codes import CodeSource
from llmc.options import parse_options
from llmc.passes.pipeline import default
from tests.gguf_families import family_model
from tests.gguf_files import write_gguf
from tests.tiny_models import tiny_tokens

OPTIONS = parse_options({"dtype": "float32"})
TOKENS = tiny_tokens(9)
# Rows of 256 columns, which super-blocks need.
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Captured, Path]:
    """A file of many types, captured, and its export."""
    place = tmp_path_factory.mktemp("exported")
    kinds = {"attn_q": "Q4_0", "attn_k": "Q6_K", "attn_v": "Q5_K", "attn_o": "IQ4_NL", "gate": "Q4_K", "up": "Q4_1"}
    write_gguf(place / "tiny.gguf", family_model("llama", **_WIDE), "Q8_0", kinds=kinds)
    model = capture(place / "tiny.gguf", OPTIONS)
    graph = graph_at(model, Stage.CANONICAL, OPTIONS, default(), Stages(None))
    write_model_files(graph, model.source, place, nothing)
    return model, place / "model.onnx"


def test_codes_are_read_bit_by_bit(exported: tuple[Captured, Path]) -> None:
    model, file = exported
    again = capture(file, OPTIONS).source
    assert isinstance(model.source, CodeSource) and isinstance(again, CodeSource)
    pairs = {name: f"{name.replace('.', '_')}_codes" for name in model.source.names() if model.source.weight(name)}
    assert len(pairs) >= 14
    for name, exported_name in pairs.items():
        stored, read = model.source.weight(name), again.weight(exported_name)
        assert stored is not None and read is not None and read.format == stored.format, name
        parts = model.source.unpacked(name).parts()
        assert parts.keys() == again.unpacked(exported_name).parts().keys(), name
        for part in parts:
            one, other = model.source.load(f"{name}::{part}"), again.load(f"{exported_name}::{part}")
            assert one.dtype is other.dtype and torch.equal(one, other), (name, part)


def test_the_graph_gives_the_same_logits(exported: tuple[Captured, Path]) -> None:
    model, file = exported
    again = capture(file, OPTIONS)
    expected = run_tokens(model.graph, model.source, TOKENS)
    torch.testing.assert_close(run_tokens(again.graph, again.source, TOKENS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda node: node.attribute.remove(_format(node)), "its format is None"),
        (lambda node: setattr(_format(node), "s", b"q7_k"), "its format is 'q7_k'"),
        (lambda node: node.input.__setitem__(1, "input_ids"), "'input_ids', is not an initializer"),
        (lambda node: node.input.__setitem__(1, node.input[0]), "its scales are torch.int8"),
        (lambda node: node.input.__setitem__(1, "model_layers_1_mlp_down_proj_weight_scales"), "do not fit codes"),
    ],
)
def test_damaged_codes_are_refused(
    damage: object, problem: str, exported: tuple[Captured, Path], tmp_path: Path
) -> None:
    _, file = exported
    proto = onnx.load(file, load_external_data=False)
    assert callable(damage)
    damage(next(node for node in proto.graph.node if node.op_type == "dequantize"))
    for path in file.parent.iterdir():
        copy(path, tmp_path)
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match=problem):
        capture(tmp_path / "model.onnx", OPTIONS)


def _format(node: onnx.NodeProto) -> onnx.AttributeProto:
    (entry,) = (attribute for attribute in node.attribute if attribute.name == "format")
    assert isinstance(entry, onnx.AttributeProto)
    return entry
