"""Opening engines: every kind of damage is named, with the file and what to do, before anything is executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.engine_format import FORMAT_VERSION, TargetRecord, read_engine
from llmc.engine_format.manifest import Manifest, content_digest, manifest_text, read_manifest
from llmc.engine_format.writer import EngineWriter
from llmc.errors import EngineFormatError, LlmcError, TargetError
from llmc.program.program_json import program_to_json
from tests.runtime.tiny_engine import copied, tiny_manifest, tiny_model, tiny_program, write_tiny_engine

WEIGHTS = "weights/rank0-0000.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "whole.llmc")


@pytest.fixture
def engine(whole: Path, tmp_path: Path) -> Path:
    return copied(whole, tmp_path / "e.llmc")


def refuse(engine: Path, problem: str, at: str = "") -> LlmcError:
    with pytest.raises(LlmcError, match=problem) as caught:
        read_engine(engine)
    assert caught.value.at is not None and at in caught.value.at
    assert caught.value.fix
    return caught.value


def resign(engine: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Change the manifest and make its digest fit again."""
    manifest = change(read_manifest(engine))
    (engine / "manifest.json").write_text(manifest_text(manifest), encoding="utf-8")


def edit(engine: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest's JSON and make its digest fit again."""
    content = json.loads((engine / "manifest.json").read_text(encoding="utf-8"))
    change(content)
    del content["manifest_sha256"]
    content["manifest_sha256"] = content_digest(content)
    (engine / "manifest.json").write_text(json.dumps(content), encoding="utf-8")


def test_a_whole_engine_opens(whole: Path) -> None:
    opened = read_engine(whole)
    assert opened.program == tiny_program(tiny_model())
    assert opened.manifest == replace(tiny_manifest(tiny_model()), files=opened.manifest.files)
    assert list(opened.manifest.files) == ["graph.json", "program.json", WEIGHTS]
    assert len(opened.tensors) == len(opened.program.weights)


def test_no_engine_there(tmp_path: Path) -> None:
    refuse(tmp_path / "none.llmc", "there is no such engine")
    (tmp_path / "file").write_text("x")
    refuse(tmp_path / "file", "an engine is a directory")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "has no manifest.json: it is not an engine")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    error = refuse(tmp_path / "model", "a model directory, not an engine")
    assert error.fix is not None and "llmc build" in error.fix


@pytest.mark.parametrize("text", ["", "not json", "[]", "null", "[" * 100_000, '{"format": "zip"}'])
def test_manifest_of_another_kind(engine: Path, text: str) -> None:
    (engine / "manifest.json").write_text(text)
    refuse(engine, "manifest", "manifest.json")


def test_binary_manifest(engine: Path) -> None:
    (engine / "manifest.json").write_bytes(b"\xff\xfe\x00")
    refuse(engine, "not JSON", "manifest.json")


def test_other_format_version(engine: Path) -> None:
    edit(engine, lambda content: content.update(format_version=FORMAT_VERSION - 1))
    error = refuse(
        engine, f"written in format {FORMAT_VERSION - 1}, this llmc reads format {FORMAT_VERSION}", "manifest.json"
    )
    assert error.fix is not None and "rebuild" in error.fix


def test_changed_manifest(engine: Path) -> None:
    path = engine / "manifest.json"
    path.write_text(path.read_text().replace('"vocab_size": 97', '"vocab_size": 98'))
    refuse(engine, "does not match its own digest", "manifest.json")


def test_unknown_missing_and_mistyped_fields(engine: Path) -> None:
    edit(engine, lambda content: content.update(colour="red"))
    refuse(engine, "unknown field 'colour'", "manifest.json")
    edit(engine, lambda content: (content.pop("colour"), content["model"].pop("family")))
    refuse(engine, "the field 'family' is missing", "manifest.json: manifest.model")
    edit(engine, lambda content: content["model"].update(family=7))
    refuse(engine, "expected a string, found 7", "manifest.json: manifest.model.family")
    edit(engine, lambda content: content["model"].update(family="x", vocab_size=True))
    refuse(engine, "expected a whole number, found True", "manifest.json: manifest.model.vocab_size")
    edit(engine, lambda content: (content["model"].update(vocab_size=97), content.update(files=[])))
    refuse(engine, r"expected an object, found \[\]", "manifest.json: manifest.files")


@pytest.mark.parametrize("name", ["program.json", "graph.json", WEIGHTS])
def test_missing_truncated_and_longer_files(engine: Path, name: str) -> None:
    data = (engine / name).read_bytes()
    (engine / name).write_bytes(data[:-1])
    refuse(engine, f"truncated: it has {len(data) - 1} bytes, the manifest says {len(data)}", name)
    (engine / name).write_bytes(data + b"x")
    refuse(engine, "too long", name)
    (engine / name).unlink()
    refuse(engine, f"{name} is missing", name)


@pytest.mark.parametrize("name", ["program.json", "graph.json", WEIGHTS])
def test_corrupt_files(engine: Path, name: str) -> None:
    data = bytearray((engine / name).read_bytes())
    data[len(data) // 2] ^= 1
    (engine / name).write_bytes(data)
    refuse(engine, "the file is corrupt", name)


def test_weights_are_not_hashed_when_asked(engine: Path) -> None:
    data = bytearray((engine / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (engine / WEIGHTS).write_bytes(data)
    read_engine(engine, check_weights=False)
    with pytest.raises(EngineFormatError, match="corrupt"):
        read_engine(engine)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "weights/../../x"])
def test_file_names_that_leave_the_engine(engine: Path, name: str) -> None:
    resign(engine, lambda m: replace(m, files={**m.files, name: m.files["program.json"]}))
    refuse(engine, "is not allowed in an engine", "manifest.json")


def test_names_that_the_file_system_refuses(engine: Path) -> None:
    refuse(engine.parent / ("x" * 300), "cannot read the engine: File name too long")
    resign(engine, lambda m: replace(m, files={**m.files, "y" * 300: m.files["program.json"]}))
    refuse(engine, "cannot read the engine: File name too long", "yyy")


def test_a_required_file_that_the_manifest_does_not_list(engine: Path) -> None:
    resign(engine, lambda m: replace(m, files={k: v for k, v in m.files.items() if k != "graph.json"}))
    refuse(engine, "lists 0 files to execute", "manifest.json")
    resign(engine, lambda m: replace(m, files={k: v for k, v in m.files.items() if k != "program.json"}))
    refuse(engine, "lists no program.json", "manifest.json")


def test_hashes_that_do_not_cover_the_file(engine: Path) -> None:
    resign(engine, lambda m: replace(m, files={**m.files, WEIGHTS: replace(m.files[WEIGHTS], sha256=())}))
    refuse(engine, "0 and 1 hashes are listed", "manifest.json")


def test_manifest_and_program_disagree(engine: Path) -> None:
    resign(engine, lambda m: replace(m, limits=replace(m.limits, max_model_len=9)))
    refuse(engine, "max_model_len=9", "program.json")


def test_program_that_is_no_program(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "e.llmc") as writer:
        writer.write_text("program.json", '{"limits": 3}')
        writer.write_text("graph.json", "{}")
        writer.finish(tiny_manifest(tiny_model()))
    refuse(tmp_path / "e.llmc", "program", "program.json")


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"\xff" * 8, "the header claims"),
        (b"\x05" + b"\x00" * 7 + b"{bad}", "not that of safetensors"),
        (b"\x02" + b"\x00" * 7 + b"{}", "no weight file holds"),
        (b"\x02" + b"\x00" * 7 + b"[]", "not that of safetensors"),
    ],
)
def test_weight_files_of_another_kind(tmp_path: Path, header: bytes, problem: str) -> None:
    with EngineWriter(tmp_path / "e.llmc") as writer:
        writer.write_text("program.json", program_to_json(tiny_program(tiny_model())))
        writer.write_text("graph.json", "{}")
        writer.write_bytes(WEIGHTS, header + b" " * 64)
        writer.finish(tiny_manifest(tiny_model()))
    refuse(tmp_path / "e.llmc", problem, "weights")


@pytest.mark.parametrize(
    "change",
    [{"dtype": "F16"}, {"shape": [-1]}, {"data_offsets": [0, 1 << 40]}, {"shape": "wide"}, {"data_offsets": [0]}],
)
def test_tensors_that_do_not_fit(engine: Path, change: dict[str, object], tmp_path: Path) -> None:
    data = (engine / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["q"].update(change)
    text = json.dumps(header).encode().ljust(length)
    with EngineWriter(tmp_path / "other.llmc") as writer:
        for name in ("program.json", "graph.json"):
            writer.copy_file(name, engine / name)
        writer.write_bytes(WEIGHTS, len(text).to_bytes(8, "little") + text + data[8 + length :])
        writer.finish(tiny_manifest(tiny_model()))
    refuse(tmp_path / "other.llmc", "not that of safetensors|the program expects", "weights")


def test_an_engine_for_another_machine(engine: Path) -> None:
    def foreign(machine: str | None, *features: str) -> Callable[[Manifest], Manifest]:
        return lambda m: replace(m, target=TargetRecord("reference", machine, features))

    resign(engine, foreign(None, "avx1024f", "zz_new"))
    error = refuse(engine, "this machine lacks avx1024f, zz_new")
    assert isinstance(error, TargetError)
    resign(engine, foreign("vax"))
    refuse(engine, "lacks vax processor")
