"""What `llmc verify` judges by, and how it says what is allowed."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from llmc.cli.table import FittingTable
from llmc.cli.verify import comparison_table, has_experts, token_sequences
from llmc.debug.allowed_difference import Allowed
from llmc.debug.compare import Comparison, compare
from tests.cli.command import MODEL
from tests.cli.command import llmc as run
from tests.gguf_families import family_model
from tests.gguf_files import write_gguf
from tests.prefixed_tokenizer import BOS, write_prefixed_tokenizer

ALLOWED = Allowed(0.25, 0.25, "bfloat16")
MIXTURE = Path(__file__).parents[2] / "examples" / "models" / "bard-mixture"


def differing(worst: float, middle: float) -> Comparison:
    """Of three tokens whose logits have a spread of one."""
    theirs = np.tile(np.array([[-1.0, 1.0]], np.float32), (3, 1))
    ours = theirs + np.array([[middle], [worst], [0.0]], np.float32)
    return compare(lambda tokens: ours, lambda tokens: theirs, [[0, 1, 0]])


def printed(table: FittingTable) -> str:
    file = io.StringIO()
    Console(width=140, file=file).print(table)
    return file.getvalue()


def test_what_is_allowed_is_not_rounded() -> None:
    shown = printed(comparison_table(differing(worst=0.3, middle=0.1), ALLOWED, "the model"))
    assert "3.00e-01, too large (≤ 0.25: bfloat16)" in shown and "middle" not in shown


def test_a_mixture_in_16_bits_is_judged_by_the_token_in_the_middle() -> None:
    """A near tie of the router sends a token to another expert where numbers are rounded, which is no fault."""
    shown = printed(comparison_table(differing(worst=0.3, middle=0.1), ALLOWED, "the model", in_the_middle=True))
    assert "3.00e-01, not judged" in shown and "1.00e-01, ok (≤ 0.25" in shown
    wrong = printed(comparison_table(differing(worst=0.4, middle=0.3), ALLOWED, "the model", in_the_middle=True))
    assert "3.00e-01, too large (≤ 0.25" in wrong


def rough(sharpness: float) -> Any:
    """A model whose attention chooses sharply, so that rounding to 16 bits moves its logits far."""
    torch.manual_seed(0)
    model = family_model("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(sharpness)
    return model.float()


def test_16_bits_are_held_to_hugging_face_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose own logits are further from fp32 than a fixed tolerance would allow."""
    monkeypatch.setenv("COLUMNS", "160")
    rough(10.0).save_pretrained(tmp_path / "model")
    path = tmp_path / "engine.llmc"
    llmc.build(tmp_path / "model", path, target="reference", dtype="bfloat16", max_model_len=64)
    outcome = run("verify", path, "--against", tmp_path / "model", "--length", "32", "--sequences", "2")
    assert outcome.code == 0, outcome.out + outcome.err
    own = re.search(r"the same of Hugging Face in the dtype\s+│\s+(\S+)", outcome.out)
    assert own is not None and float(own[1]) > 0.25
    assert "2 × Hugging Face's own in bfloat16" in outcome.out


def test_every_window_begins_as_a_prompt_does(tmp_path: Path) -> None:
    """A model that was trained with <bos> in front predicts worse without it."""
    model, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(MODEL, model)
    write_prefixed_tokenizer(model / "tokenizer.json")
    text.write_text("Once upon a time there was a king. " * 20)
    llmc.build(model, tmp_path / "engine.llmc", target="reference", max_model_len=64)
    with llmc.load(tmp_path / "engine.llmc") as engine:
        ids = engine.tokenize(text.read_text())
        sequences = token_sequences(engine, text, 32, None, 0)
    assert len(sequences) > 2 and all(each[0] == BOS and len(each) <= 32 for each in sequences)
    assert [token for each in sequences for token in each[1:]] == ids[1:]


def test_a_gguf_file_is_what_an_engine_was_built_from(tmp_path: Path) -> None:
    file, path = tmp_path / "tiny.gguf", tmp_path / "engine.llmc"
    write_gguf(file, family_model("llama"), "Q8_0")
    llmc.build(file, path, target="reference", dtype="float32", max_model_len=64)
    outcome = run("verify", path, "--against", file, "--length", "16", "--sequences", "1")
    assert outcome.code == 0, outcome.out + outcome.err
    assert "top-1 agreement" in outcome.out


@pytest.mark.parametrize(("model_type", "expected"), [("mixtral", True), ("llama", False)])
def test_engines_say_whether_they_have_experts(model_type: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "engine.llmc"
    llmc.build(tiny_architecture(model_type), path, target="reference", max_model_len=32)
    with llmc.load(path) as engine:
        assert has_experts(engine) is expected


@pytest.mark.slow
def test_the_shipped_mixture_is_right(tmp_path: Path) -> None:
    path = tmp_path / "mixture.llmc"
    assert run("build", MIXTURE, "-o", path).code == 0
    outcome = run("verify", path, "--against", MIXTURE)
    assert outcome.code == 0, outcome.err
    assert "the token in the middle" in outcome.out
