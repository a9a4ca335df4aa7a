"""`llmc report`, `llmc profile` and `llmc viz`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.passes.pipeline import built_in
from llmc.settings import settings
from tests.cli.command import MODEL, assert_user_error, llmc
from tests.runtime.tiny_engine import write_tiny_engine


@pytest.mark.slow
def test_profile_then_report(draft_engine: Path, tmp_path: Path) -> None:
    profile, trace, page = (tmp_path / name for name in ("profile.json", "trace.json", "page.html"))
    arguments = ("--prefill", "16", "--context", "16", "--repeats", "2", "--threads", "1")
    outcome = llmc("profile", draft_engine, *arguments, "--json", profile, "--trace", trace)
    assert outcome.code == 0, outcome.err
    for part in ("prefill of 16 tokens", "decode, 1 request at context 16", "predicted", "lm_head", "all", "perfetto"):
        assert part in outcome.out
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X"}
    outcome = llmc("report", draft_engine, "-o", page, "--profile", profile, "--threads", "1")
    assert outcome.code == 0, outcome.err
    assert str(page) in outcome.out
    assert '"measured":true' in page.read_text(encoding="utf-8")
    other = write_tiny_engine(tmp_path / "other.llmc")
    assert_user_error(llmc("report", other, "--profile", profile), "is of another engine")


def test_viz_writes_where_it_is_told(draft_engine: Path, tmp_path: Path) -> None:
    assert llmc("viz", draft_engine, "--format", "mermaid").out.startswith("---\ntitle:")
    assert llmc("viz", draft_engine, "--stage", "serving", "--format", "json", "-o", tmp_path / "graph.json").code == 0
    assert json.loads((tmp_path / "graph.json").read_text())["stage"] == "serving"
    assert_user_error(llmc("viz", draft_engine, "--format", "png"), "is not a format")
    assert_user_error(llmc("viz", draft_engine, "--format", "onnx"), "llmc export MODEL --stage optimized")
    assert_user_error(llmc("viz", draft_engine, "--stage", "lowered"), "not a stage")
    assert_user_error(llmc("viz", tmp_path / "missing"), "missing")


def test_a_page_that_cannot_be_written(draft_engine: Path, tmp_path: Path) -> None:
    assert_user_error(llmc("report", draft_engine, "-o", tmp_path / "no" / "page.html"), "cannot write the file")
    assert_user_error(llmc("profile", draft_engine, "--prefill", "4096"), "prefill cannot be 4096")


def test_verbs_that_run_passes_dump_the_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in (("passes", MODEL), ("viz", MODEL, "--format", "json"), ("explain", MODEL)):
        directory = tmp_path / str(verb[0])
        monkeypatch.setenv("LLMC_DUMP", str(directory))
        settings.cache_clear()
        assert llmc(*verb).code == 0
        names = [file.name for file in sorted(directory.iterdir())]
        assert names[0] == "00-captured.txt" and names[-1].endswith(f"-{built_in()[-1].name}.txt")
    monkeypatch.undo()
    settings.cache_clear()
