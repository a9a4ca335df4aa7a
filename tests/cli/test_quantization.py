"""Quantizing on the command line: what the build reports, what is kept in the engine, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.command import MODEL, Outcome, assert_user_error, llmc
from tests.passes.quantization.quantizing import calibration_file
from tests.quantized_checkpoints import tiny_llama

DATA = MODEL.parent.parent / "data"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    path = tmp_path_factory.mktemp("quantized") / "draft.llmc"
    options = ("--quantize", "int4-gptq", "--quantize", "lm_head=w8a8", "--kv-cache", "int8")
    calibration = ("--calibration", DATA / "calibration.txt", "--calibration-sequences", "3")
    return path, llmc("build", MODEL, "-o", path, *options, *calibration)


def test_build_reports_each_weight(build: tuple[Path, Outcome]) -> None:
    path, outcome = build
    assert outcome.code == 0, outcome.err
    for part in ("quantized weights:", "int4-gptq", "w8a8", "4.125", "output error", "KV cache", "a token"):
        assert part in outcome.out
    assert "quantize" in outcome.err
    weights = json.loads((path / "report" / "quantization.json").read_text())
    assert len(weights) == 15
    assert all(0 < weight["error"] < 0.2 for weight in weights)


def test_inspect_shows_them_again(build: tuple[Path, Outcome]) -> None:
    outcome = llmc("inspect", build[0], "--quantization")
    assert outcome.code == 0, outcome.err
    assert "int4-gptq" in outcome.out
    assert "output error" in outcome.out


@pytest.mark.slow
def test_verify_compares_perplexities(build: tuple[Path, Outcome], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((DATA / "heldout.txt").read_text()[:2500])
    arguments = ("verify", build[0], "--against", MODEL, "--perplexity", text)
    measured, page = tmp_path / "perplexity.json", tmp_path / "page.html"
    outcome = llmc(*arguments, "--max-ratio", "1.15", "--json", measured)
    assert outcome.code == 0, outcome.err
    assert "ratio" in outcome.out
    assert_user_error(llmc(*arguments, "--max-ratio", "0.5"), "times the model's; 0.5 is allowed")
    outcome = llmc("report", build[0], "-o", page, "--perplexity", measured, "--threads", "1")
    assert outcome.code == 0, outcome.err
    record = json.loads(measured.read_text())
    assert f'"perplexity":{record["perplexity"]}' in page.read_text(encoding="utf-8")
    measured.write_text(json.dumps(record | {"kv_cache": "auto"}))
    assert_user_error(llmc("report", build[0], "--perplexity", measured), "is of another engine", "llmc verify")
    assert_user_error(llmc("report", build[0], "--perplexity", tmp_path / "none"), "cannot be read")
    assert_user_error(llmc("verify", build[0], "--against", MODEL, "--json", measured), "--perplexity TEXT")


@pytest.mark.slow
def test_mixed_precision_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every weight that it chose for, in the build's table and again in inspect's."""
    monkeypatch.setenv("COLUMNS", "200")
    model, engine = tmp_path / "model", tmp_path / "engine.llmc"
    tiny_llama().save_pretrained(model)
    options = ("--quantize", "auto:5.2", "--quantize", "lm_head=int8", "--target", "reference")
    built = llmc("build", model, "-o", engine, *options, "--calibration", calibration_file(tmp_path))
    assert built.code == 0, built.err
    for out in (built.out, llmc("inspect", engine, "--quantization").out):
        assert "why" in out
        assert out.count("in sensitivity") == 14
        assert not [line for line in out.splitlines() if "lm_head" in line and "in sensitivity" in line]
        (first,) = (line for line in out.splitlines() if "layers.0.self_attn.q_proj" in line)
        assert re.search(r"KL \d\.\d\de[+-]\d+ at 4 bits, number \d+ of 8 in sensitivity", first)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--quantize", "int7"), ("unknown quantization scheme 'int7'", "known: int8")),
        (("--quantize", "int4-gptq"), ("no calibration text is given", "--calibration FILE")),
        (("--quantize", "int4,no_such=int8"), ("no weight is called 'no_such'", "down_proj")),
        (("--kv-cache", "int2"), ("unknown KV cache format 'int2'", "int8, int4, fp8")),
        (("--quantize", "int4-gptq", "--calibration", "no-such-file"), ("cannot read the calibration data",)),
    ],
)
def test_refuses_before_work_is_done(options: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path) -> None:
    outcome = llmc("build", MODEL, "-o", tmp_path / "e.llmc", *options)
    assert_user_error(outcome, *parts)
    assert not (tmp_path / "e.llmc").exists()
