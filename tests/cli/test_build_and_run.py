"""`llmc build`, `run` and `chat` beyond the plain case: default outputs, model directories, JSON, grammars."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.settings import settings
from llmc.targets import host_target
from tests.cache_beside import cache_beside
from tests.cli.command import MODEL, assert_user_error, llmc

SHORT = ("--max-model-len", "64", "--target", "reference")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An engine cache of this file's own."""
    path = cache_beside(tmp_path_factory.mktemp("cache") / "llmc")
    before = os.environ.get("LLMC_CACHE_DIR")
    os.environ["LLMC_CACHE_DIR"] = str(path)
    settings.cache_clear()
    yield path
    del os.environ["LLMC_CACHE_DIR"]
    if before is not None:
        os.environ["LLMC_CACHE_DIR"] = before
    settings.cache_clear()


def test_an_engine_is_named_after_model_and_target_and_replaced_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = llmc("build", MODEL, *SHORT)
    assert outcome.code == 0, outcome.err
    name = "bard-draft-reference.llmc"
    assert f"writes {name}" in outcome.err and f"llmc run {name}" in outcome.out
    before = (tmp_path / name / "manifest.json").read_bytes()
    shorter = ("--target", "reference", "--max-model-len", "32")
    assert_user_error(llmc("build", MODEL, *shorter), "stands there", "--force")
    assert (tmp_path / name / "manifest.json").read_bytes() == before
    assert llmc("build", MODEL, *shorter, "--force").code == 0
    assert (tmp_path / name / "manifest.json").read_bytes() != before


def test_a_directory_that_is_no_engine_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert_user_error(llmc("build", MODEL, "-o", tmp_path, "--force"), "not an engine")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_on_a_terminal_it_is_asked(draft_engine: Path) -> None:
    before = (draft_engine / "manifest.json").read_bytes()
    here, there = pty.openpty()
    command = [sys.executable, "-m", "llmc", "build", str(MODEL), "-o", str(draft_engine)]
    process = subprocess.Popen(command, stdin=there, stdout=there, stderr=there)
    os.close(there)
    os.write(here, b"n\n")
    shown = b""
    try:
        while piece := os.read(here, 4096):
            shown += piece
    except OSError:  # The end of a terminal whose process is gone.
        pass
    os.close(here)
    assert process.wait() == 2 and b"replace it?" in shown, shown
    assert (draft_engine / "manifest.json").read_bytes() == before


def test_options_are_checked_before_anything_is_captured(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def captured(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was read")

    monkeypatch.setattr("llmc.frontends.capture.capture", captured)
    monkeypatch.setattr("llmc.compiler.capture", captured)
    nowhere = tmp_path / "absent" / "file"
    assert_user_error(llmc("run", MODEL, "-p", "hi", "--top-p", "7"), "--top-p", "7")
    assert_user_error(llmc("run", MODEL, "-p", "hi", "--grammar", "x.png"), "is not a grammar", "regex:")
    assert_user_error(llmc("run", MODEL, "-p", "hi", "--grammar", nowhere.with_suffix(".json")), "absent")
    assert_user_error(llmc("run", MODEL, "-p", "hi", "--quantize", "int3"), "int3")
    assert_user_error(llmc("run", MODEL, "-p", "hi", "--target", "h1000"), "h1000")
    assert_user_error(llmc("run", MODEL, "-p", "hi", "--system", "Be brief."), "--chat")
    assert_user_error(llmc("run", MODEL, "-p", "hi", "--chat", "--chat-template", str(nowhere)), "template")
    assert_user_error(llmc("chat", MODEL, "--temperature", "-1"), "temperature")
    assert_user_error(llmc("build", MODEL, "-o", tmp_path / "e", "--target", "h1000"), "h1000")
    assert_user_error(llmc("viz", MODEL, "-o", nowhere), "cannot write the file", str(nowhere))
    assert not any(cache.rglob("*.llmc"))


def test_output_files_are_checked_before_anything_is_measured(draft_engine: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "absent" / "file"
    for verb in (
        ("profile", draft_engine, "--json", nowhere),
        ("profile", draft_engine, "--trace", tmp_path),
        ("report", draft_engine, "-o", nowhere),
        ("verify", draft_engine, "--against", MODEL, "--perplexity", nowhere, "--json", nowhere),
        ("bench", "latency", draft_engine, "--json", nowhere),
        ("bench", "throughput", draft_engine, "--json", nowhere),
        ("bench", "startup", draft_engine, "--json", nowhere),
    ):
        assert_user_error(llmc(*verb), "cannot write the file")


def test_run_builds_a_model_directory_once(cache: Path) -> None:
    command = ("run", MODEL, "--prompt", "The king", "--max-tokens", "4", *SHORT)
    first = llmc(*command)
    assert first.code == 0 and first.out.startswith("The king"), first
    engines = set(cache.rglob("*.llmc"))
    assert len(engines) == 1
    assert llmc(*command).out == first.out and set(cache.rglob("*.llmc")) == engines


def test_chat_takes_a_model_directory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/tokens\nGood morrow\n/tokens\n"))
    outcome = llmc("chat", MODEL, "--max-tokens", "3", *SHORT)
    assert outcome.code == 0 and outcome.out.count(" of 64 tokens\n") == 2, outcome
    assert "\n0 of 64 tokens\n" in outcome.out


def test_an_engine_is_not_built_again(draft_engine: Path) -> None:
    for option in (("--dtype", "float32"), ("--quantize", "int4"), ("--target", "h100")):
        assert_user_error(llmc("run", draft_engine, "-p", "hi", *option), option[0], "engine", "model directory")


def test_run_json(draft_engine: Path) -> None:
    outcome = llmc("run", draft_engine, "-p", "The king", "-p", "A\nB", "--max-tokens", "5", "--json")
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["The king", "A\nB"]
    assert all(len(line["token_ids"]) == 5 and line["finish_reason"] == "length" for line in lines)
    plain = llmc("run", draft_engine, "-p", "The king", "--max-tokens", "5").out
    assert plain == "The king" + lines[0]["text"] + "\n"


def test_run_chat_uses_the_template(draft_engine: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    options = ("--max-tokens", "6", "--chat-template", str(template))
    answer = llmc("run", draft_engine, "--chat", "-p", "hi", "--system", "Be brief.", *options)
    raw = llmc("run", draft_engine, "-p", "system=Be brief.;user=hi;", "--max-tokens", "6", "--json")
    assert answer.out == json.loads(raw.out)["text"] + "\n"
    plain = llmc("run", draft_engine, "--chat", "-p", "hi", "--max-tokens", "3", "--json")
    assert "no chat template" in plain.err and json.loads(plain.out)["prompt"] == "hi"


@pytest.mark.parametrize(
    ("grammar", "accepted"),
    [
        ("choice:yes|no", {"yes", "no"}),
        ("regex:(to be){2}", {"to beto be"}),
        ("schema.json", {'{"a":true}', '{"a":false}', '{"a": true}', '{"a": false}'}),
        ("words.gbnf", {"ho", "hoho"}),
        ("words.lark", {"ho", "hoho"}),
    ],
)
def test_run_follows_a_grammar(grammar: str, accepted: set[str], draft_engine: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(
        '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
    )
    (tmp_path / "words.gbnf").write_text('root ::= "ho" "ho"?')
    (tmp_path / "words.lark").write_text('start: "ho" "ho"?')
    named = str(tmp_path / grammar) if "." in grammar else grammar
    outcome = llmc("run", draft_engine, "-p", "Say: ", "--grammar", named, "--max-tokens", "40", "--json")
    assert json.loads(outcome.out)["text"] in accepted, outcome


def test_the_host_is_the_default_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = llmc("build", MODEL, "--speculative", tmp_path / "absent")
    assert f"writes bard-draft-{host_target().name}.llmc" in outcome.err and outcome.code == 2
