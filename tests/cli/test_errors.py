"""Bad input on the command line: exit code 2, one clean message, nothing half-written."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc import load
from llmc.cli.run import stream_one
from llmc.engine_format import FORMAT_VERSION
from llmc.errors import LlmcError, RequestError
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.cli.command import MODEL, assert_user_error, llmc


@pytest.fixture
def engine(draft_engine: Path, tmp_path: Path) -> Path:
    """For tests that break it."""
    return Path(shutil.copytree(draft_engine, tmp_path / "engine.llmc"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def change_config(model: Path, **values: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def library(engine: Path) -> Path:
    return next((engine / "kernels").glob("*.so"))


BROKEN_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "config.json missing": (lambda m: (m / "config.json").unlink(), "config.json"),
    "config.json not JSON": (lambda m: (m / "config.json").write_text("{"), "config.json"),
    "weights missing": (lambda m: (m / "model.safetensors").unlink(), "safetensors"),
    "weights truncated": (lambda m: truncate(m / "model.safetensors"), "model.safetensors"),
    "weights' header corrupt": (lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 64), "model.safetensors"),
    "unknown architecture": (lambda m: change_config(m, model_type="martian"), "martian"),
    "encoder-decoder": (lambda m: change_config(m, model_type="t5", architectures=["T5Model"]), "t5"),
    "tokenizer corrupt": (lambda m: truncate(m / "tokenizer.json"), "tokenizer.json"),
    "frequencies that follow the length": (
        lambda m: change_config(m, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        "longrope",
    ),
    "shapes of another model": (lambda m: change_config(m, intermediate_size=100), "gate_proj"),
}


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_broken_model_directories(name: str, model: Path, tmp_path: Path) -> None:
    break_it, part = BROKEN_MODELS[name]
    break_it(model)
    output = tmp_path / "out.llmc"
    assert_user_error(llmc("build", model, "-o", output), part)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"], "something was left behind"


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    output = tmp_path / "out.llmc"
    (tmp_path / "file").write_text("hello")
    assert_user_error(llmc("build", tmp_path / "absent", "-o", output), "absent")
    assert_user_error(llmc("build", tmp_path / "file", "-o", output), "file")
    assert_user_error(llmc("build", tmp_path, "-o", output), "config.json")
    assert not output.exists()


def test_unknown_targets_and_options(tmp_path: Path) -> None:
    output = tmp_path / "out.llmc"
    assert_user_error(llmc("build", MODEL, "-o", output, "--target", "cpu-x86-64-v9"), "cpu-x86-64-v9", "cpu-portable")
    assert_user_error(llmc("build", MODEL, "-o", output, "--dtype", "float8"), "float8", "dtype")
    assert_user_error(llmc("build", MODEL, "-o", output, "--block-size", "7"), "--block-size", "7")
    assert_user_error(llmc("build", MODEL, "-o", output, "--disable-pass", "fuse_rmsnorm"), "fuse_rms_norm")
    assert_user_error(llmc("build", MODEL, "-o", output, "--disable-pass", "page_kv_cache"), "page_kv_cache")
    assert_user_error(llmc("build", MODEL, "-o", output, "--max-model-len", "9999"), "9999", "2048")
    assert_user_error(llmc("build", MODEL, "-o", output, "--allow-fallback", "speed"), "allow_fallback", "speed")
    assert llmc("build", MODEL, "-o", output, "--max-sequnces", "3").code == 2
    assert not output.exists()


def test_a_pipeline_cut_too_early_cannot_be_an_engine(tmp_path: Path) -> None:
    assert_user_error(
        llmc("build", MODEL, "-o", tmp_path / "out.llmc", "--stop-after", "5"), "--stop-after 5", "serving"
    )
    assert not any(tmp_path.iterdir())


def test_output_that_is_not_an_engine_is_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert_user_error(llmc("build", MODEL, "-o", tmp_path), str(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    output = tmp_path / "out.llmc"
    assert_user_error(llmc("build", MODEL, "-o", output), "no C++ compiler", "install", "--target reference")
    assert not output.exists()


BROKEN_ENGINES: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest missing": (lambda e: (e / "manifest.json").unlink(), "manifest.json"),
    "program missing": (lambda e: (e / "program.json").unlink(), "program.json"),
    "library truncated": (lambda e: truncate(library(e)), "truncated"),
    "library corrupt": (lambda e: corrupt(library(e)), "kernels/engine-"),
    "weights missing": (lambda e: next((e / "weights").iterdir()).unlink(), "missing"),
    "weights truncated": (lambda e: truncate(next((e / "weights").iterdir())), "truncated"),
    "weights corrupt": (lambda e: corrupt(next((e / "weights").iterdir())), "safetensors"),
    "another format": (
        lambda e: (e / "manifest.json").write_text(
            (e / "manifest.json").read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 99')
        ),
        "99",
    ),
}


@pytest.mark.parametrize("name", BROKEN_ENGINES)
@pytest.mark.parametrize("verb", ["run", "inspect"])
def test_broken_engines(name: str, verb: str, engine: Path) -> None:
    break_it, part = BROKEN_ENGINES[name]
    break_it(engine)
    arguments = ["--prompt", "hi"] if verb == "run" else []
    assert_user_error(llmc(verb, engine, *arguments), part)


def test_requests_that_the_engine_cannot_serve(draft_engine: Path, tmp_path: Path) -> None:
    assert_user_error(llmc("run", draft_engine, "--prompt", "word " * 300), "255")
    assert_user_error(llmc("run", draft_engine, "--prompt", "hi", "--temperature", "-1"), "temperature", "-1")
    assert_user_error(llmc("run", draft_engine, "--prompt-file", tmp_path / "absent.txt"), "absent.txt")
    assert_user_error(llmc("run", draft_engine, "--prompt", "hi", "--threads", "0"), "threads")
    assert_user_error(llmc("verify", draft_engine, "--against", tmp_path), "config.json")


def test_the_command_itself_exits_with_2_and_a_traceback_only_when_asked(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmc", "run", str(tmp_path / "absent.llmc"), "--prompt", "hi"]
    plain = subprocess.run(command, capture_output=True, text=True)
    assert plain.returncode == 2
    assert plain.stdout == ""
    assert [line.split(":")[0].strip() for line in plain.stderr.splitlines()] == ["error", "at", "fix"]
    debug = subprocess.run(command, capture_output=True, text=True, env={"LLMC_DEBUG": "1"})
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr


def test_an_error_within_an_answer_begins_a_line(draft_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A draft may turn out to be corrupt after some text is printed; here a function of the user fails."""

    def fails(tokens: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(tokens) == 3:
            raise RequestError("three are enough", fix="ask for less")
        return logits

    params = SamplingParams(max_tokens=8, ignore_eos=True, logits_processors=(fails,))
    with load(draft_engine) as engine, pytest.raises(LlmcError, match="three are enough"):
        stream_one(engine, "KING", "KING", params)
    out = capsys.readouterr().out
    assert len(out) > len("KING\n") and out.startswith("KING") and out.endswith("\n")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--calibration", "nope.txt"), "nope.txt"),
        (("--disable-pass", "fuse_rop"), "did you mean 'fuse_rope'?"),
        (("--lora", "style=nowhere"), "nowhere"),
        (("--quantize", "int4-gptq"), "needs activations"),
        (("--prune", "layers=1"), "needs activations"),
    ],
    ids=" ".join,
)
def test_what_options_name_is_looked_for_before_the_model_is_read(
    wrong: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = llmc("build", MODEL, *wrong)
    assert_user_error(outcome, said)
    assert "writes" not in outcome.err
    assert "capture" not in outcome.err


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_a_mistyped_model_is_told_before_where_its_engine_goes(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = llmc("build", f"./{place}")
    assert_user_error(outcome, "model directory")
    assert "writes" not in outcome.err


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"format": "other"}'])
@pytest.mark.parametrize("verb", [("run", "-p", "a"), ("inspect",)], ids=" ".join)
def test_a_damaged_manifest_is_not_called_missing(content: str, verb: tuple[str, ...], engine: Path) -> None:
    (engine / "manifest.json").write_text(content)
    outcome = llmc(verb[0], engine, *verb[1:])
    assert_user_error(outcome, "manifest")
    assert "has no manifest.json" not in outcome.err


def test_a_prompt_file_called_minus_is_standard_input(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("The king"))
    outcome = llmc("run", engine, "--prompt-file", "-", "--max-tokens", "2")
    assert outcome.code == 0 and outcome.out.startswith("The king")
