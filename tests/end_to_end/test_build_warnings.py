"""What a build does unasked, or finds in a model, is said: once, with names, and in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import llmc
from llmc.errors import BuildWarning, OptionError
from llmc.options import parse_options
from tests.cli.command import llmc as command
from tests.frontends.checkpoints import edit_json, edit_weights
from tests.plain_modules import eager_decoder
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_model


@pytest.mark.parametrize("kind", quick_sample(["directory", "model", "module"], ["directory"]))
def test_half_precision_is_built_as_bfloat16_where_it_is_not_computed_in(kind: str, tmp_path: Path) -> None:
    given: Any = eager_decoder() if kind == "module" else tiny_model("llama")
    given = given.to(torch.float16)
    if kind == "directory":
        given.save_pretrained(tmp_path / "model")
        given = str(tmp_path / "model")
    with pytest.warns(BuildWarning, match=r"the model is float16, .* built as bfloat16, .*float32 keeps every bit"):
        report = llmc.build(given, tmp_path / "e.llmc", target="reference")
    assert len(report.warnings) == 1
    with llmc.load(tmp_path / "e.llmc") as engine:
        assert engine.info.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("FP32", "float32"),
        ("float", "float32"),
        (torch.bfloat16, "bfloat16"),
        ("auto", "auto"),
    ],
)
def test_spellings_of_dtypes(given: object, meant: str) -> None:
    parsed = parse_options({"dtype": given, "kv_dtype": given})
    assert (parsed.dtype, parsed.kv_dtype) == (meant, meant)


def test_what_is_no_dtype() -> None:
    with pytest.raises(OptionError, match="build option 'dtype' cannot be 'int8'"):
        parse_options({"dtype": "int8"})


def test_weights_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path / "model")

    def damage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.0.mlp.up_proj.weight"][3, :2] = torch.nan
        tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] = -torch.inf
        return tensors

    edit_weights(directory, damage)
    with pytest.warns(BuildWarning) as caught:
        report = llmc.build(str(directory), tmp_path / "e.llmc", target="reference")
    (warning,) = report.warnings
    assert str(caught[0].message) == warning
    assert warning.startswith("2 weights hold numbers that are not finite: ")
    assert "model.layers.0.mlp.up_proj.weight (2 NaN)" in warning
    assert "model.layers.1.self_attn.o_proj.weight (1 Inf)" in warning


def test_matrices_of_zeros_are_named(tmp_path: Path) -> None:
    """Also one that is merged with others; a row of zeros is nothing to tell of."""
    directory = tiny_checkpoint("llama", tmp_path / "model")

    def damage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.0.mlp.up_proj.weight"].zero_()
        tensors["model.layers.1.self_attn.o_proj.weight"][0] = 0.0
        return tensors

    edit_weights(directory, damage)
    with pytest.warns(BuildWarning, match="1 weight holds nothing but zeros"):
        report = llmc.build(str(directory), tmp_path / "e.llmc", target="reference")
    assert report.warnings == ("1 weight holds nothing but zeros: model.layers.0.mlp.up_proj.weight",)


def test_the_command_line_shows_warnings_below_its_tables(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path / "model")
    edit_json(directory / "config.json", lambda config: config.update(num_hidden_layers=1))
    for name in ("first", "from_the_capture_cache"):
        shown = command("build", directory, "-o", tmp_path / name, "--target", "reference")
        assert shown.code == 0, shown.err
        assert "warning: 9 tensors of the checkpoint are not used: model.layers.1.input_layernorm.weight" in shown.err
        assert "BuildWarning" not in shown.err
