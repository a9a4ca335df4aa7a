"""The tables of real models, on the shipped draft and a small file: figures, records that go on, numbers of codes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import llmc
from benchmarks.contestants.protocol import serve_texts
from benchmarks.quality import divergence
from benchmarks.real_model_files import in_type, numbers_of
from benchmarks.real_model_quality import Record, Row, Windows, bits_of_file
from benchmarks.real_model_speculation import SHARES, requests, shares_of_heads
from benchmarks.table_record import record_table
from llmc.debug.compare import Logits, Perplexity
from llmc.errors import OptionError
from tests.gguf_families import family_model
from tests.gguf_files import write_gguf

ROW = Row("int4", 4.25, 27.5, 0.0123, 0.987, 61.0, 8192, "2026-11-28")
ABOUT: dict[str, str | int | None] = {"machine": "one", "text": "heldout.txt", "length": 512, "windows": 16}


def test_figures_are_those_of_the_whole_text(draft_engine: Path, tmp_path: Path) -> None:
    pieces = [[(7 * i + j) % 4000 + 3 for i in range(40)] for j in range(2)]
    judged = Windows(draft_engine, pieces, tmp_path, 1)
    with llmc.load(draft_engine, threads=1) as engine:
        plain: list[Logits] = [engine.logits(piece) for piece in pieces]
    other: list[Logits] = [(rows + np.sin(np.arange(rows.shape[1]))).astype(np.float32) for rows in plain]
    row, perplexity = judged.row("other", other), Perplexity()
    for changed, piece in zip(other, pieces, strict=True):
        perplexity.add(changed, piece)
    assert row.perplexity == pytest.approx(perplexity.value, rel=1e-5) and row.tokens == 80
    assert row.divergence == pytest.approx(np.mean([divergence(p, o) for p, o in zip(plain, other, strict=True)]), 1e-4)
    same = np.mean([p.argmax(-1) == o.argmax(-1) for p, o in zip(plain, other, strict=True)])
    assert row.same == pytest.approx(same)
    assert judged.unrounded().same == 1.0 and judged.unrounded().divergence < 1e-6


def test_a_record_goes_on_where_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "results" / "quality.json"
    Record.at(file, ABOUT).add(ROW)
    again = Record.at(file, ABOUT)
    assert again.has("int4") and not again.has("int8")
    again.add(replace(ROW, form="int8", bits=None))
    text, *lines = Record.at(file, ABOUT).lines()
    assert text == "8,192 tokens of heldout.txt in windows of 512"
    assert lines[2:] == [
        "| int4 | 4.25 | 27.500 | 0.0123 | 98.7% | 61 |",
        "| int8 |  | 27.500 | 0.0123 | 98.7% | 61 |",
    ]
    with pytest.raises(OptionError, match=r"'windows': 16.* this run is about .*'windows': None"):
        Record.at(file, ABOUT | {"windows": None})


def test_numbers_are_what_the_codes_of_a_file_stand_for(tmp_path: Path) -> None:
    model, file = family_model("llama"), tmp_path / "small.gguf"
    expected = write_gguf(file, model, "Q8_0")
    directory = numbers_of(file, tmp_path)
    assert directory == numbers_of(file, tmp_path) == tmp_path / "small"
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in expected.items():
        if name in tensors:
            torch.testing.assert_close(tensors[name], tensor.float(), rtol=0, atol=0)
    assert (directory / "config.json").exists() and not list(directory.glob("*.gguf"))
    assert set(tensors) >= {name for name in expected if name.endswith("proj.weight")}


def test_a_file_of_another_type_keeps_everything_but_its_matrices(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file, family_model("llama"), "Q8_0")
    rounded = in_type(file, "MXFP4", tmp_path)
    assert rounded == in_type(file, "MXFP4", tmp_path) == tmp_path / "small-MXFP4.gguf"
    before, after = gguf.GGUFReader(file), gguf.GGUFReader(rounded)
    fields = [{name: field.contents() for name, field in each.fields.items()} for each in (before, after)]
    assert fields[0] == fields[1]
    assert [tensor.name for tensor in before.tensors] == [tensor.name for tensor in after.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        values = [gguf.quants.dequantize(each.data, each.tensor_type) for each in (old, new)]
        if new.tensor_type == gguf.GGMLQuantizationType.MXFP4:
            assert 0.0 < np.square(values[1] - values[0]).sum() < 0.05 * np.square(values[0]).sum()
        else:
            assert new.tensor_type == old.tensor_type and np.array_equal(values[0], values[1])
    kinds = {tensor.name: tensor.tensor_type.name for tensor in after.tensors}
    assert kinds["blk.0.attn_q.weight"] == "MXFP4" and kinds["token_embd.weight"] == "Q8_0"


def test_requests_are_about_eight_places_of_the_text() -> None:
    asked = requests("prose " * 1000, "code " * 1000)
    assert {len(prompts) for prompts in asked.values()} == {8}
    assert all("code" in prompt for prompt in asked["a program with a name changed"])


def test_bits_of_a_file_are_those_of_its_matrices(tmp_path: Path) -> None:
    """Blocks of 34 bytes for 32 numbers; norms are fp32 and not counted."""
    file = tmp_path / "small.gguf"
    write_gguf(file, family_model("llama"), "Q8_0")
    assert bits_of_file(file) == 8.5


class _Letters:
    """Vectors of texts: how often two letters are in them."""

    def embed(self, texts: list[str]) -> list[list[float]]:
        return [[float(text.count("a")), float(text.count("b"))] for text in texts]


def test_a_contestant_answers_with_vectors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", ['{"texts": ["abba", "b"]}'])
    serve_texts(_Letters())
    ready, answer = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert ready == {"ready": True}
    assert answer["vectors"] == [[2.0, 2.0], [0.0, 1.0]] and answer["seconds"] >= 0


def test_shares_of_heads_are_shown_where_they_were_trained(tmp_path: Path) -> None:
    assert not list(shares_of_heads(tmp_path))
    (tmp_path / SHARES).write_text("[[0.268, 0.53], [0.17, 0.387]]")
    assert list(shares_of_heads(tmp_path))[3:] == ["| 1 | 0.27 | 0.53 |", "| 2 | 0.17 | 0.39 |"]


def test_a_table_is_kept_with_what_it_depends_on(tmp_path: Path) -> None:
    file = tmp_path / "results" / "errors.json"
    record_table(file, {"machine": "one"}, ["| a |", "|---|"])
    kept = json.loads(file.read_text())
    assert date.fromisoformat(kept.pop("date"))
    assert kept == {"machine": "one", "table": ["| a |", "|---|"]}
