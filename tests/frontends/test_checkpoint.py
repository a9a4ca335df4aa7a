"""Checkpoints: reading single and sharded ones, and what is said about broken ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from tests.frontends.checkpoints import edit_header, edit_json, split_into_shards

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.arange(6).to(torch.bfloat16),
    "mask": torch.tensor([True, False]),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of three tensors in one file."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def refused(directory: Path) -> CheckpointError:
    """The error that opening the directory raises."""
    with pytest.raises(CheckpointError) as error:
        SafetensorsSource(directory)
    return error.value


def test_reads_tensors_in_their_dtype(directory: Path) -> None:
    source = SafetensorsSource(directory)
    assert source.names() == ("a.weight", "b.weight", "mask")
    for name, tensor in TENSORS.items():
        loaded = source.load(name)
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor)
    assert source.dtype() == torch.float32


def test_reads_shards(directory: Path) -> None:
    split_into_shards(directory)
    source = SafetensorsSource(directory)
    assert source.names() == tuple(sorted(TENSORS))
    assert all(torch.equal(source.load(name), tensor) for name, tensor in TENSORS.items())


def test_an_unknown_name_is_an_error(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'c\.weight' \(3 tensors found\)"):
        SafetensorsSource(directory).load("c.weight")


@pytest.mark.parametrize(
    ("shape", "floating", "name", "problem"),
    [
        ((4, 3), True, "a.weight", r"has shape \[3, 4\], but config.json gives it the shape \[4, 3\]"),
        ((2,), True, "mask", "is stored as BOOL"),
    ],
)
def test_check_compares_with_the_model(
    directory: Path, shape: tuple[int, ...], floating: bool, name: str, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        SafetensorsSource(directory).check(name, shape, floating=floating)


def test_missing_shard_is_named(directory: Path) -> None:
    first, _ = split_into_shards(directory)
    first.unlink()
    error = refused(directory)
    assert "model-00001-of-00002.safetensors is missing" in error.problem
    assert error.at == str(first)


def test_the_index_says_which_shard_holds_a_tensor(directory: Path) -> None:
    first, second = split_into_shards(directory)
    save_file({"a.weight": TENSORS["a.weight"], "b.weight": torch.zeros(6)}, first)
    save_file({"a.weight": torch.ones(2), "b.weight": TENSORS["b.weight"], "mask": TENSORS["mask"]}, second)
    source = SafetensorsSource(directory)
    assert all(torch.equal(source.load(name), tensor) for name, tensor in TENSORS.items())


def sharded(directory: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str]) -> None:
    """Shards with these tensors, and an index that places tensors so."""
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_tensor_that_the_index_does_not_place_is_read_where_it_is_alone(tmp_path: Path) -> None:
    one, two = torch.ones(1), torch.ones(2)
    shards = {"1.safetensors": {"a": one, "moved": two}, "2.safetensors": {"b": one, "unnamed": two}}
    sharded(tmp_path, shards, {"a": "1.safetensors", "b": "2.safetensors", "moved": "2.safetensors"})
    source = SafetensorsSource(tmp_path)
    assert source.names() == ("a", "b", "moved", "unnamed") and source.shape("moved") == source.shape("unnamed") == (2,)


@pytest.mark.parametrize("named", [None, "3.safetensors"])
def test_a_tensor_in_two_shards_that_the_index_places_in_neither_is_refused(named: str | None, tmp_path: Path) -> None:
    vector = torch.ones(1)
    shards = {f"{number}.safetensors": {own: vector, "twice": torch.zeros(1)} for number, own in ((1, "a"), (2, "b"))}
    weight_map = {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"}
    sharded(tmp_path, {**shards, "3.safetensors": {"c": vector}}, weight_map | ({"twice": named} if named else {}))
    problem = refused(tmp_path).problem
    assert problem.startswith("tensor 'twice' is in 1.safetensors and 2.safetensors, and the index names it for ")
    assert problem.endswith("none" if named is None else "3.safetensors, which has no such tensor")


def test_a_single_file_goes_before_shards_and_a_note_says_so(directory: Path, tmp_path: Path) -> None:
    split_into_shards(directory)
    assert SafetensorsSource(directory).notes == ()
    save_file({"a.weight": torch.ones(2)}, directory / "model.safetensors")
    source = SafetensorsSource(directory)
    assert source.names() == ("a.weight",)
    assert "model.safetensors is read, and the shards of model.safetensors.index.json" in source.notes[0]


def test_an_index_of_a_single_file_is_nothing_to_say(directory: Path) -> None:
    index = {"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    source = SafetensorsSource(directory)
    assert source.names() == tuple(sorted(TENSORS)) and source.notes == ()


def test_shards_without_an_index_are_named(directory: Path) -> None:
    split_into_shards(directory)
    (directory / "model.safetensors.index.json").unlink()
    assert "there are model-00001-of-00002.safetensors, model-00002-of" in refused(directory).problem


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_eight_bits_whose_scales_nothing_tells_are_refused(stored: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(4, 4).to(stored), "a.weight_scale": torch.ones(1), "norm": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"stored as F8_E\dM\d, next to a\.weight_scale, and no file says"
    ) as caught:
        source.check("a.weight", (4, 4), floating=True)
    assert "quantization_config" in str(caught.value.fix)
    assert source.dtype() is torch.float32


def test_index_names_a_tensor_that_no_shard_has(directory: Path) -> None:
    split_into_shards(directory)
    file = directory / "model.safetensors.index.json"
    edit_json(file, lambda index: index["weight_map"].update(ghost="model-00001-of-00002.safetensors"))
    assert "first 'ghost'" in refused(directory).problem


def test_index_without_a_map(directory: Path) -> None:
    split_into_shards(directory)
    edit_json(directory / "model.safetensors.index.json", dict.clear)
    assert "no weight_map" in refused(directory).problem


def test_index_that_leads_out_of_the_directory(directory: Path) -> None:
    split_into_shards(directory)
    file = directory / "model.safetensors.index.json"
    edit_json(file, lambda index: index["weight_map"].update({"a.weight": "../other.safetensors"}))
    assert "outside its directory: '../other.safetensors'" in refused(directory).problem


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_file(directory: Path, keep: int) -> None:
    file = directory / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:keep])
    error = refused(directory)
    assert "truncated: the file has" in error.problem
    assert error.at == str(file)
    assert error.fix is not None


def test_trailing_bytes(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    assert "has trailing bytes" in refused(directory).problem


@pytest.mark.parametrize("header", [b"not json at all", b'["a list"]', b'{"a": 1, "a": 2}', b"\xff\xfe"])
def test_corrupt_header(directory: Path, header: bytes) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "corrupt header" in refused(directory).problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data_offsets", [0, 40]),
        ("data_offsets", ["0", "48"]),
        ("data_offsets", None),
        ("shape", [-3, 4]),
        ("shape", 12),
        ("dtype", 7),
    ],
)
def test_corrupt_header_entry(directory: Path, key: str, value: object) -> None:
    edit_header(directory / "model.safetensors", lambda header: header["a.weight"].update({key: value}))
    error = refused(directory)
    assert "corrupt header" in error.problem
    assert "'a.weight'" in error.problem


def test_a_file_that_breaks_after_it_was_opened(directory: Path) -> None:
    source = SafetensorsSource(directory)
    (directory / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"cannot read 'a\.weight'"):
        source.load("a.weight")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that exists and cannot be read")
def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/proc/self/mem")
    assert refused(tmp_path).problem.startswith("cannot read it: ")


def test_header_length_beyond_the_formats_limit(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((2**28).to_bytes(8, "little"))
        stream.truncate(2**28 + 8)
    assert "not a safetensors file: its header claims 268435456 bytes" in refused(tmp_path).problem


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    error = refused(tmp_path)
    assert "pytorch_model.bin" in error.problem
    assert error.fix is not None and "save_pretrained" in error.fix


def test_no_weights(tmp_path: Path) -> None:
    assert "no weights" in refused(tmp_path).problem


def test_no_floating_point_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no floating-point tensor"):
        SafetensorsSource(tmp_path).dtype()
