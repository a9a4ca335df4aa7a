"""The one door to engine files: nothing that is no regular file or that no hash covers is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.engine_format import FORMAT_VERSION, engine_files, read_engine
from llmc.errors import EngineFormatError, LlmcError
from llmc.files.regular_file import read_regular
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.server.sampling import SamplingDefaults, engine_defaults
from llmc.runtime.text.chat_template import engine_template
from tests.runtime.tiny_engine import copied, write_tiny_engine

WEIGHTS = "weights/rank0-0000.safetensors"
NAMES = ("manifest.json", "program.json", "graph.json", "tokenizer/tokenizer.json", WEIGHTS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("files") / "whole.llmc", with_tokenizer=True)


@pytest.fixture
def engine(whole: Path, tmp_path: Path) -> Path:
    return copied(whole, tmp_path / "e.llmc")


def test_what_is_no_regular_file_is_refused_and_not_read(whole: Path, tmp_path: Path) -> None:
    """In a process of its own: opening such a pipe would wait for ever, reading such a device never end."""
    engines: list[tuple[str, str, str]] = []
    for kind in ("pipe", "device", "directory"):
        for name in NAMES:
            file = copied(whole, tmp_path / f"{kind}-{len(engines)}") / name
            engines.append((str(tmp_path / f"{kind}-{len(engines)}"), kind, str(file)))
            file.unlink()
            if kind == "pipe":
                os.mkfifo(file)
            elif kind == "device":
                file.symlink_to("/dev/zero")
            else:
                file.mkdir()
    script = """
import json, sys
from pathlib import Path
from llmc.engine_format import read_engine
from llmc.errors import EngineFormatError
for engine, kind, file in json.load(sys.stdin):
    try:
        read_engine(Path(engine))
    except EngineFormatError as error:
        assert f"a {kind}, not a regular file" in error.problem and error.at == file, error
    else:
        raise AssertionError(f"{engine} was read")
"""
    subprocess.run([sys.executable, "-c", script], input=json.dumps(engines), text=True, check=True)


def test_a_link_to_the_same_bytes_is_as_good(engine: Path, tmp_path: Path) -> None:
    for index, name in enumerate(NAMES):
        (engine / name).rename(tmp_path / str(index))
        (engine / name).symlink_to(tmp_path / str(index))
    read_engine(engine)


def test_a_manifest_without_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    os.truncate(tmp_path / "manifest.json", 1 << 40)
    with pytest.raises(EngineFormatError, match="more than the"):
        read_engine(tmp_path)
    with pytest.raises(EngineFormatError, match="the file has 5 bytes, more than the 4"):
        (tmp_path / "five").write_text("12345")
        read_regular(tmp_path / "five", 4)


def test_files_that_the_manifest_does_not_list_do_not_exist(engine: Path) -> None:
    for name, text in (
        ("chat_template.jinja", "{{ evil }}"),
        ("tokenizer_config.json", '{"chat_template": "{{ evil }}"}'),
        ("generation_config.json", '{"temperature": 0.25}'),
    ):
        (engine / "tokenizer" / name).write_text(text)
    files = engine_files(engine)
    assert engine_template(files) is None
    assert engine_defaults(files) == SamplingDefaults()
    assert "tokenizer/chat_template.jinja" not in files
    with pytest.raises(EngineFormatError, match=r"the manifest lists no tokenizer/chat_template\.jinja"):
        files.text("tokenizer/chat_template.jinja")


def test_what_is_read_is_what_was_hashed(engine: Path) -> None:
    files = engine_files(engine)
    text = files.text("program.json")
    (engine / "program.json").write_text(text.replace("1", "2"))
    with pytest.raises(EngineFormatError, match="the file is corrupt: bytes from 0 on have SHA-256"):
        files.text("program.json")


def test_a_tokenizer_that_is_no_text_is_named(engine: Path) -> None:
    (engine / "tokenizer/tokenizer.json").write_bytes(b"\xff" * (engine / "tokenizer/tokenizer.json").stat().st_size)
    with pytest.raises(EngineFormatError, match="corrupt"), load(engine) as opened:
        opened.generate("Once", SamplingParams(max_tokens=1))


def test_engines_of_the_format_before_are_rebuilt(engine: Path) -> None:
    manifest = engine / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 3'))
    with pytest.raises(LlmcError, match=f"written in format 3, this llmc reads format {FORMAT_VERSION}") as caught:
        load(engine)
    assert caught.value.fix == f"rebuild it: llmc build MODEL -o {engine}"
