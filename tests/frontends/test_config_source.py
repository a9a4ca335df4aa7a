"""A model of which there is only config.json: the same graph, with weights that have shapes and no numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from llmc.architectures.tiny_config import tiny_config
from llmc.codegen.sketch import sketch
from llmc.errors import CheckpointError
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.frontends.transformers.config import load_config
from llmc.graph.render import render
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.program import Program
from tests.tiny_models import tiny_checkpoint


def program(captured: Captured, **options: object) -> Program:
    chosen = parse_options(options)
    result = run_pipeline(captured.graph, default(), chosen, data=ModelData(captured.source))
    return sketch(result.graph, chosen)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of one model: with weights and without."""
    whole, bare = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("bare")
    tiny_checkpoint("llama", whole)
    shutil.copy(whole / "config.json", bare)
    return whole, bare


@pytest.mark.slow
def test_it_makes_the_program_of_the_model_with_weights(directories: tuple[Path, Path]) -> None:
    options = parse_options({"dtype": "float32"})
    whole, bare = (capture(directory, options, may_lack_weights=True) for directory in directories)
    assert render(bare.graph) == render(whole.graph)
    assert bare.source.names() == whole.source.names()
    for chosen in ({}, {"quantize": "int8"}, {"tensor_parallel_size": 2}):
        assert program(bare, **chosen) == program(whole, **chosen)


def test_its_weights_have_no_numbers(directories: tuple[Path, Path]) -> None:
    source = capture(directories[1], parse_options({}), may_lack_weights=True).source
    first = source.load(source.names()[0])
    assert first.is_meta and first.dtype is torch.float32
    with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
        source.load("nothing")


def test_nobody_builds_from_it_unasked(directories: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        capture(directories[1], parse_options({}))


def test_what_needs_numbers_says_so(directories: tuple[Path, Path]) -> None:
    tokens = directories[1].parent / "tokens.json"
    tokens.write_text(str([1, 2, 3, 4] * 16))
    captured = capture(directories[1], parse_options({}), may_lack_weights=True)
    with pytest.raises(CheckpointError, match="no weights to choose zeros of"):
        program(captured, sparsity="magnitude:0.5")
    with pytest.raises(CheckpointError, match="no weights to calibrate with"):
        program(
            captured,
            quantize="int8-gptq",
            calibration=str(tokens),
            calibration_sequences=1,
            calibration_length=16,
        )


def test_a_text_half_that_is_known_by_the_whole_models_type_is_found(tmp_path: Path) -> None:
    tiny_config("emu3").save_pretrained(tmp_path)
    loaded = load_config(tmp_path)
    assert (loaded.config.model_type, loaded.model_class.__name__) == ("emu3_text_model", "Emu3ForCausalLM")
