"""External data of ONNX files: read from the model's directory and from nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from llmc.errors import CheckpointError
from llmc.frontends.onnx.model import read_model
from llmc.frontends.onnx.tensors import OnnxTensor
from tests.frontends.onnx.graphs import VOCABULARY, WIDTH, decoder, random, saved

_SIZE = VOCABULARY * WIDTH * 4


def _external(folder: Path, **entries: str) -> Path:
    """A model whose table lies at `entries`, and a file outside its directory."""
    (folder / "outside").mkdir(exist_ok=True)
    (folder / "outside" / "secret").write_bytes(b"s" * _SIZE)
    model = decoder()
    (table,) = (initializer for initializer in model.graph.initializer if initializer.name == "table")
    table.ClearField("raw_data")
    table.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        table.external_data.add(key=key, value=value)
    return saved(model, folder / "model")


def _table(file: Path) -> OnnxTensor:
    return read_model(file).graph.tensors["table"]


def _refused(file: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_model(file)


def test_a_tensor_beside_the_file_is_read(tmp_path: Path) -> None:
    values = random(VOCABULARY, WIDTH)
    file = _external_file(tmp_path, b"12345678" + values.tobytes(), offset="8", length=str(_SIZE))
    assert np.array_equal(_table(file).load().numpy(), values)


def _external_file(folder: Path, content: bytes, **entries: str) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "data").write_bytes(content)
    return _external(folder, location="data", **entries)


def test_cve_2026_27489_a_link_that_leads_out_of_the_directory(tmp_path: Path) -> None:
    """onnx read whatever a link among the model's files led to."""
    file = _external(tmp_path, location="data")
    (tmp_path / "model" / "data").symlink_to(tmp_path / "outside" / "secret")
    _refused(file, "is not a file in the model's directory")


def test_cve_2026_34446_a_hard_link(tmp_path: Path) -> None:
    """onnx refused links by their kind, which a hard link does not have."""
    file = _external(tmp_path, location="data")
    os.link(tmp_path / "outside" / "secret", tmp_path / "model" / "data")
    _refused(file, r"has 2 names \(hard links\)")


def test_cve_2026_34447_a_directory_that_is_a_link(tmp_path: Path) -> None:
    """onnx looked at the last part of the path alone."""
    file = _external(tmp_path, location="folder/secret")
    (tmp_path / "model" / "folder").symlink_to(tmp_path / "outside", target_is_directory=True)
    _refused(file, "is not a file in the model's directory")


@pytest.mark.parametrize(
    "location",
    ["../outside/secret", "a/../../outside/secret", "..\\outside\\secret", "C:\\secret", "", ".", "a\0b", "x" * 5000],
)
def test_a_location_that_is_no_file_of_the_directory(location: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_model(_external(tmp_path, location=location))


def test_an_absolute_location(tmp_path: Path) -> None:
    secret = tmp_path / "outside" / "secret"
    _refused(_external(tmp_path, location=str(secret)), "is not a file in the model's directory")


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"offset": "1"}, "ends at byte 641 of 'data', which has 640"),
        ({"offset": str(2**64)}, "not a number of bytes"),
        ({"offset": "-8"}, "not a number of bytes"),
        ({"offset": "9223372036854775807"}, "ends at byte"),
        ({"length": "639"}, "has 639 bytes in 'data', where its shape and type take 640"),
        ({"length": str(2**40)}, "where its shape and type take 640"),
        ({"length": "six"}, "not a number of bytes"),
    ],
)
def test_a_place_beyond_the_file(entries: dict[str, str], match: str, tmp_path: Path) -> None:
    _refused(_external_file(tmp_path, bytes(_SIZE), **entries), match)


def test_a_pipe_in_the_place_of_data_is_refused_at_once(tmp_path: Path) -> None:
    file = _external(tmp_path, location="data")
    os.mkfifo(tmp_path / "model" / "data")
    _refused(file, "it is a pipe, not a regular file")


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    table = _table(_external_file(tmp_path, bytes(_SIZE)))
    (tmp_path / "model" / "data").write_bytes(b"")
    with pytest.raises(CheckpointError, match="became shorter"):
        table.load()


def test_a_snapshot_of_the_hubs_cache_links_to_its_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs" / "abc").write_bytes(bytes(_SIZE))
    file = _external(snapshot.parent, location="data")
    file.rename(snapshot / "model.onnx")
    (snapshot / "data").symlink_to("../../blobs/abc")
    assert _table(snapshot / "model.onnx").load().shape == (VOCABULARY, WIDTH)


def test_over_two_gib_of_external_data_take_no_memory(tmp_path: Path) -> None:
    """pytorch#147259: files of such models were broken. The tensor lies behind 2 GiB of a sparse file."""
    values = random(VOCABULARY, WIDTH)
    start = (2 << 30) + 4096
    file = _external(tmp_path, location="data", offset=str(start), length=str(_SIZE))
    with (tmp_path / "model" / "data").open("wb") as data:
        data.seek(start)
        data.write(values.tobytes())
    assert np.array_equal(_table(file).load().numpy(), values)


@pytest.mark.parametrize("dims", [[2**40, 2**40], [2**62], [-1, 8], [1] * 20])
def test_a_tensor_of_an_absurd_shape(dims: list[int], tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend(dims)

    with pytest.raises(CheckpointError, match="shape"):
        read_model(saved(decoder(), tmp_path / "model", change))


def test_a_tensor_with_fewer_bytes_than_its_shape(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].dims[0] = 2**31

    with pytest.raises(CheckpointError, match="does not have 68719476736 bytes"):
        read_model(saved(decoder(), tmp_path / "model", change))
