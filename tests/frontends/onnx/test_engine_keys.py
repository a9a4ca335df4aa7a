"""Engines of ONNX models are found again until anything changes that they were read from."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.engines.engine_cache import engine_key, find_or_build_engine
from llmc.errors import CheckpointError
from tests.frontends.onnx.graphs import decoder, saved


def test_a_key_holds_all_that_lies_beside_the_file(tmp_path: Path) -> None:
    file = saved(decoder(), tmp_path / "model")
    keys = {engine_key(place, "cpu", {}) for place in (file, file.parent)}
    (file.parent / "weights.data").write_bytes(b"1")
    keys |= {engine_key(place, "cpu", {}) for place in (file, file.parent)}
    (file.parent / "weights.data").write_bytes(b"22")
    keys |= {engine_key(place, "cpu", {}) for place in (file, file.parent)}
    assert len(keys) == 6
    assert engine_key(file, "cpu", {}) in keys


def test_a_config_around_a_folder_called_onnx_is_part_of_it(tmp_path: Path) -> None:
    file = saved(decoder(), tmp_path / "onnx")
    before = engine_key(file, "cpu", {})
    (tmp_path / "config.json").write_text("{}")
    assert engine_key(file, "cpu", {}) != before


def test_a_directory_of_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither an engine nor a model directory"):
        find_or_build_engine(tmp_path)
