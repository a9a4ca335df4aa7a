"""What an export leaves: whole directories, files that other tools read, models that are the same each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors import safe_open

import llmc
from llmc.errors import EngineFormatError, LlmcError, LoweringError, OptionError
from tests.tiny_models import tiny_checkpoint

FILES = ["config.json", "generation_config.json", "model.onnx", "weights.safetensors"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), torch.bfloat16, num_hidden_layers=1)


def test_an_export_is_a_directory_that_onnx_accepts(checkpoint: Path, tmp_path: Path) -> None:
    report = llmc.export(checkpoint, tmp_path / "out", stage="canonical")
    assert sorted(file.name for file in report.path.iterdir()) == FILES
    onnx.checker.check_model(report.path / "model.onnx", full_check=True)
    model = onnx.load(report.path / "model.onnx", load_external_data=False)
    assert (report.nodes, report.functions) == (len(model.graph.node), len(model.functions))
    assert {node.domain for node in model.graph.node} == {"llmc", "aten", ""}
    # What is in bf16 is widened, exactly.
    with (
        safe_open(report.path / "weights.safetensors", "pt") as ours,
        safe_open(checkpoint / "model.safetensors", "pt") as theirs,
    ):
        name = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(ours.get_tensor(name.replace(".", "_")), theirs.get_tensor(name).float())


def test_it_replaces_an_earlier_one_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    first = llmc.export(checkpoint, tmp_path / "out", stage="captured")
    before = (first.path / "weights.safetensors").read_bytes(), (first.path / "model.onnx").read_bytes()
    llmc.export(checkpoint, tmp_path / "out", stage="captured")
    assert before == ((first.path / "weights.safetensors").read_bytes(), (first.path / "model.onnx").read_bytes())
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(EngineFormatError, match="is not an exported model"):
        llmc.export(checkpoint, other, stage="captured")
    assert [file.name for file in other.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"stage": "lowered"}, OptionError, "'lowered' is not a stage that can be exported"),
        ({"dtype": "bfloat16"}, OptionError, "ONNX models compute in float32, not bfloat16"),
        ({"tensor_parallel_size": 2}, LoweringError, "runs on 2 ranks, and an ONNX model on one"),
    ],
)
def test_what_it_cannot_do_is_named(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], error: type[LlmcError], text: str
) -> None:
    with pytest.raises(error, match=text):
        llmc.export(checkpoint, tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())
