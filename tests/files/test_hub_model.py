"""Models by their names on the hub: huggingface_hub itself, against a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.files.hub_model import HubName, fetched_model, hub_name, model_name, repository_of
from llmc.frontends.onnx.files import onnx_file
from tests.hub_server import COMMIT, Hub, hub_with

MODEL = Path(__file__).parent.parent.parent / "examples" / "models" / "bard-draft"
# huggingface_hub reads its settings when it is imported.
ASK = """
import json, sys
from llmc.errors import LlmcError
from llmc.files.hub_model import fetched_model
from llmc.frontends.front_ends import hub_files
for name, weights in json.loads(sys.argv[1]):
    try:
        print(json.dumps(str(fetched_model(name, hub_files() if weights else ()))))
    except LlmcError as error:
        print(json.dumps([error.problem, error.fix]))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    files = tmp_path / "files"
    (files / "original").mkdir(parents=True)
    for file in MODEL.iterdir():
        (files / file.name).symlink_to(file)
    (files / "modeling_code.py").write_text("raise SystemExit('code from a checkpoint has run')")
    (files / "consolidated.safetensors").write_bytes(b"the same weights again")
    (files / "original" / "params.json").write_text("{}")
    with hub_with("org/tiny", files) as hub:
        yield hub


def ask(hub: Hub, tmp_path: Path, *names: tuple[str, bool], **environment: str) -> list[str | list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(names)],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_only_what_a_build_reads_is_fetched_and_found_without_a_network(hub: Hub, tmp_path: Path) -> None:
    wanted = {file.name for file in MODEL.iterdir() if file.suffix in (".json", ".jinja", ".safetensors")}
    described, whole = ask(hub, tmp_path, ("org/tiny", False), ("org/tiny", True))
    assert set(hub.asked) == wanted and len(hub.asked) == len(wanted)
    assert described == whole == str(tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / COMMIT)
    snapshot = Path(str(whole))
    assert {file.name for file in snapshot.iterdir()} == wanted
    assert (repository_of(snapshot), model_name(snapshot)) == ("org/tiny", "tiny")
    offline = ask(hub, tmp_path, ("org/tiny", True), ("org/tiny@" + COMMIT, True), HF_HUB_OFFLINE="1")
    assert offline == [whole, whole]
    assert ask(hub, tmp_path, ("org/tiny", True), HF_ENDPOINT="http://127.0.0.1:1") == [whole]


def test_of_a_repository_without_safetensors_the_onnx_file_is_fetched(tmp_path: Path) -> None:
    onnx = tmp_path / "files" / "onnx"
    onnx.mkdir(parents=True)
    for name in ("model.onnx", "model.onnx_data", "model_q4.onnx", "other.bin"):
        (onnx / name).write_bytes(name.encode())
    (tmp_path / "files" / "config.json").write_text("{}")
    with hub_with("org/graph", tmp_path / "files") as hub:
        directory = ask(hub, tmp_path, ("org/graph", True))[0]
        assert set(hub.asked) == {"config.json", "onnx/model.onnx", "onnx/model.onnx_data"}
        assert onnx_file(Path(str(directory))) == Path(str(directory)) / "onnx" / "model.onnx"
        assert ask(hub, tmp_path, ("org/graph", True), HF_HUB_OFFLINE="1") == [directory]


def test_what_the_hub_does_not_give_is_refused_in_words(hub: Hub, tmp_path: Path) -> None:
    answers = ask(hub, tmp_path, ("org/other", True), ("org/gated", True), ("org/tiny@v9", True))
    assert [answer[0] for answer in answers] == [
        "org/other is neither a directory here nor a model on the hub",
        "org/gated requires consent to its terms of use",
        "org/tiny has no revision 'v9'",
    ]
    offline = ask(hub, tmp_path, ("org/new@v2", True), HF_HUB_OFFLINE="1")[0]
    assert "the hub cannot be reached for it" in offline[0] and "hf download org/new --revision v2" in offline[1]
    away = ask(hub, tmp_path, ("org/new", True), HF_ENDPOINT="http://127.0.0.1:1")[0]
    assert "the hub cannot be reached for it" in away[0] and "hf download org/new" in away[1]


@pytest.mark.parametrize("text", ["tiny", "/org/tiny", "./org/tiny", "a/b/c", "../tiny", "org/", "org/tiny@", "~/tiny"])
def test_paths_are_no_names(text: str) -> None:
    assert hub_name(text) is None
    assert fetched_model(text, ()) == Path(text)


def test_names_are_parsed() -> None:
    assert hub_name("org/tiny") == HubName("org/tiny")
    assert hub_name("org/tiny-GGUF@v1:UD-Q4_K_XL") == HubName("org/tiny-GGUF", "v1", "UD-Q4_K_XL")
    assert hub_name("Qwen/Qwen3-0.6B@refs/pr/1") == HubName("Qwen/Qwen3-0.6B", "refs/pr/1")


def test_what_stands_here_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert fetched_model("org/tiny", ()) == Path("org/tiny")
    assert model_name(Path("org/tiny")) == "tiny"
    assert fetched_model(Path("org/another"), ()) == Path("org/another")


def test_of_gguf_files_the_one_that_is_named_is_fetched(tmp_path: Path) -> None:
    """Split or whole, in a folder or not, whatever the case of its name; not one that only looks like it."""
    files = tmp_path / "files"
    (files / "Q8_0").mkdir(parents=True)
    for name in ("m-q4_0.gguf", "m-Q4_0_4_4.gguf", "mmproj-Q4_K.gguf", "m-IQ4_K.gguf", "m-a.F16.gguf", "m-b.F16.gguf"):
        (files / name).write_text(name)
    for number in (1, 2):
        (files / "Q8_0" / f"m-Q8_0-0000{number}-of-00002.gguf").write_text(str(number))
    (files / "config.json").write_text("{}")
    with hub_with("org/tiny", files) as hub:
        whole, split = ask(hub, tmp_path, ("org/tiny:Q4_0", True), (f"org/tiny@{COMMIT}:Q8_0", True))
        shards = [f"Q8_0/m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
        assert sorted(hub.asked) == [*shards, "m-q4_0.gguf"]
        assert Path(str(whole)).read_text() == "m-q4_0.gguf"
        assert str(split).endswith(shards[0])
        names = ("org/tiny:Q2_K", "org/tiny:f16", "org/tiny:b.F16")
        none, several, one = ask(hub, tmp_path, *((name, True) for name in names))
        assert none[0] == "org/tiny has no GGUF file of the type Q2_K"
        assert several[0] == "org/tiny has several GGUF files of the type f16: m-a.F16, m-b.F16"
        assert str(one).endswith("m-b.F16.gguf")
        offline = ask(hub, tmp_path, ("org/tiny:Q4_0", True), ("org/new:Q4_0", True), HF_HUB_OFFLINE="1")
        assert offline[0] == whole and "hf download org/new --include '*Q4_0*.gguf'" in offline[1][1]


@pytest.mark.slow
def test_every_verb_takes_a_name(hub: Hub, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}

    def llmc(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llmc", *words],
            env={**os.environ, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    llmc("build", "org/tiny")
    [engine] = tmp_path.glob("tiny-*.llmc")
    sample = ("--prompt", "KING:", "--max-tokens", "12", "--temperature", "0")
    assert llmc("run", "org/tiny@main", *sample) == llmc("run", engine.name, *sample)
    assert "tiny on" in llmc("simulate", "org/tiny", "--num-prompts", "2")
    assert llmc("explain", "org/tiny").splitlines()[1:] == llmc("explain", str(MODEL)).splitlines()[1:]
