"""What a new checkpoint format takes: one file and one line.

The file is npz_checkpoint/npz.py; the line is written into a copy of the package, which a process of its own runs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from llmc.errors import CheckpointError
from llmc.frontends import open_model as opening
from llmc.frontends.front_ends import OF_PATHS, Row
from llmc.frontends.open_model import open_model
from tests.codegen.package_copy import Line, changes, copied_package, run_with
from tests.frontends.npz_checkpoint import an_engine, npz
from tests.frontends.npz_checkpoint.archive import saved_archive
from tests.tiny_models import tiny_model

PLACE = "frontends/checkpoints/npz.py"
FILES = {"npz.py": PLACE}
LINES = (
    Line(
        "frontends/front_ends.py",
        '    Row("llmc.frontends.gguf.front_end", "GGUF"),',
        '    Row("llmc.frontends.checkpoints.npz", "NPZ"),',
    ),
)
CLOSE = 1e-4


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copied_package(tmp_path, Path(npz.__file__).parent, FILES, LINES)


def test_a_format_of_which_there_is_no_line_is_not_read(tmp_path: Path) -> None:
    opened = open_model(saved_archive(tiny_model("llama", num_hidden_layers=1), tmp_path))
    with pytest.raises(CheckpointError, match=r"no weights: neither model\.safetensors nor"):
        assert not opened.weights


def test_its_codes_go_into_an_engine_and_its_headers_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    read = npz.NpzSource.__init__

    def counted(source: npz.NpzSource, directory: Path) -> None:
        opened.append(directory)
        read(source, directory)

    monkeypatch.setattr(npz.NpzSource, "__init__", counted)
    monkeypatch.setattr(opening, "OF_PATHS", (Row(npz.__name__, "NPZ"), *OF_PATHS))
    labels, distance, is_noticed = an_engine.built(tmp_path)
    assert labels == ["npz int8"] and distance < CLOSE and is_noticed
    assert opened == [tmp_path / "model"]


@pytest.mark.slow
def test_one_file_and_one_line_are_a_new_format(copy: Path, tmp_path: Path) -> None:
    assert changes(copy, LINES) == (1, 1)
    labels, distance, is_noticed = json.loads(run_with(copy, "-m", an_engine.__name__, str(tmp_path)).stdout)
    assert labels == ["npz int8"] and distance < CLOSE and is_noticed


@pytest.mark.slow
def test_a_line_without_its_file_is_named(copy: Path, tmp_path: Path) -> None:
    (copy / PLACE).unlink()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_with(copy, "-m", an_engine.__name__, str(tmp_path))
    assert "llmc.frontends.checkpoints.npz" in failed.value.stderr
