"""Engines of GGUF files answer as transformers with the weights that the files stand for, and as llama.cpp does.

LLAMA_CPP_PYTHON names the Python of an environment with llama-cpp-python; without it nothing is compared with that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import llmc
from llmc.compiler import build
from llmc.frontends.gguf.container import read_model
from tests.gguf_blocks import WIDE, write_every_block
from tests.gguf_families import GGUF_FAMILIES, family_model
from tests.gguf_files import add_sentence_piece, add_tokenizer, write_gguf
from tests.tiny_models import tiny_tokens
from tests.tolerances import ENGINES

BARD = Path(__file__).parents[2] / "examples" / "models" / "bard-6m"
_ANSWERS = Path(__file__).parent / "llama_cpp_answers.py"
_VOCABULARY = 300
_TOKENS = tiny_tokens(24)
_TEXTS = ["abc cab", "  two  spaces\nand a line", "Ünïcödé 日本語", "<s>special</s>"]
# llama.cpp rounds what it multiplies with codes to 8 bits, and llmc does not: root mean square, by the logits' spread.
_ROUNDED_TOKENS = 0.1
# Weights that are random from bit to bit are wrong by up to 10% after being rounded again, each of fifteen matrices.
_ROUNDED_AGAIN = 0.5
_BLOCKED = ("Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
_EXACT = ("Q4_0", "Q5_0", "Q8_0", "MXFP4", *_BLOCKED)
_AGAIN = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "attention_bias": False}


def _pieces() -> list[tuple[str, float, int]]:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    letters = [
        *"abcdefghilmnoprstuw",
        "▁",
        "ab",
        "abc",
        "▁a",
        "ca",
        "▁ca",
        "▁cab",
        "sp",
        "es",
        "▁sp",
        "an",
        "and",
        "▁▁",
    ]
    pieces += [(letter, -float(number), 1) for number, letter in enumerate(letters)]
    return [*pieces, *((f"[{number}]", -1000.0, 1) for number in range(_VOCABULARY - len(pieces)))]


def written(path: Path, family: str, kind: str, **overrides: Any) -> Any:
    """A file with a vocabulary; the model with the weights that it stands for."""
    model = family_model(family, vocab_size=_VOCABULARY, **overrides)
    meant = write_gguf(
        path, model, kind, add=lambda writer: add_sentence_piece(writer, _pieces(), begins_with_space=True)
    )
    model.load_state_dict(meant, strict=False)
    return model


def llama_cpp(path: Path) -> dict[str, Any]:
    """Logits of _TOKENS and ids of _TEXTS."""
    python = os.environ.get("LLAMA_CPP_PYTHON")
    if python is None:
        pytest.skip("LLAMA_CPP_PYTHON does not name a Python with llama-cpp-python")
    command = [python, str(_ANSWERS), str(path), json.dumps(_TOKENS), json.dumps(_TEXTS)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr[-2000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def distance(found: Tensor | np.ndarray[Any, Any], expected: Tensor) -> float:
    return float((torch.as_tensor(found) - expected).abs().max() / expected.std())


def mean_distance(found: Tensor | np.ndarray[Any, Any], expected: Tensor) -> float:
    return float((torch.as_tensor(found) - expected).square().mean().sqrt() / expected.std())


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([_TOKENS])).logits[0]
    return logits


def greedy(model: Any, count: int) -> list[int]:
    ids = list(_TOKENS)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(_TOKENS) :]


@pytest.mark.slow
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_an_engine_says_what_the_model_says(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = written(path, family, "Q8_0")
    with llmc.compile(path, target="cpu", dtype="float32") as engine:
        assert distance(engine.logits(_TOKENS), logits_of(model)) < ENGINES
        completion = engine.generate([_TOKENS], max_tokens=64, temperature=0.0, ignore_eos=True)[0]
        assert list(completion.token_ids) == greedy(model, 64)


def test_an_engine_of_blocks_says_what_they_stand_for(tmp_path: Path) -> None:
    """Every blocked type in one model, tokens as they are; then rounded by groups, as they are without a dtype."""
    path = tmp_path / "tiny.gguf"
    add = partial(add_sentence_piece, pieces=_pieces(), begins_with_space=True)
    model = write_every_block(path, add=add, vocab_size=_VOCABULARY)
    with llmc.compile(path, target="cpu", dtype="float32") as engine:
        assert distance(engine.logits(_TOKENS), logits_of(model)) < ENGINES
    with llmc.compile(path, target="cpu") as engine:
        assert mean_distance(engine.logits(_TOKENS), logits_of(model)) < _ROUNDED_TOKENS


def test_weights_take_the_bytes_that_they_take_in_the_file(tmp_path: Path) -> None:
    """Within 2%, every blocked type in one model."""
    path = tmp_path / "tiny.gguf"
    write_every_block(path, vocab_size=_VOCABULARY * 8)
    in_file = sum(tensor.nbytes for tensor in read_model([path]).tensors.values())
    report = build(path, tmp_path / "engine.llmc", target="cpu")
    assert report.weight_bytes == pytest.approx(in_file, rel=0.02)


@pytest.mark.slow
def test_onnxruntime_runs_blocks_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", exc_type=ImportError)
    path = tmp_path / "tiny.gguf"
    model = write_every_block(path, vocab_size=_VOCABULARY)
    with llmc.compile(path, target="onnxruntime", dtype="float32") as engine:
        assert distance(engine.logits(_TOKENS), logits_of(model)) < ENGINES


@pytest.mark.slow
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_llama_cpp_says_the_same_of_each_architecture(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    # llama.cpp leaves the window of Phi 3 out.
    written(path, family, "F32", **({"sliding_window": None} if family == "phi3" else {}))
    answers = llama_cpp(path)
    with llmc.compile(path, target="cpu", dtype="float32") as engine:
        assert distance(engine.logits(_TOKENS), torch.tensor(answers["logits"])) < 2e-3
        assert [engine.tokenize(text) for text in _TEXTS] == answers["ids"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*_EXACT, *_AGAIN, "F16", "BF16"])
def test_llama_cpp_says_the_same_of_each_type(kind: str, tmp_path: Path) -> None:
    """Tokens as they are, and in a default build as well. What is rounded again stays near to what it was."""
    path = tmp_path / "tiny.gguf"
    model = written(path, "llama", kind, **WIDE)
    expected = torch.tensor(llama_cpp(path)["logits"])
    assert mean_distance(logits_of(model), expected) < _ROUNDED_TOKENS
    with llmc.compile(path, target="cpu", dtype="float32") as engine:
        unrounded = engine.logits(_TOKENS)
    with llmc.compile(path, target="cpu") as engine:
        by_default = engine.logits(_TOKENS)
    if kind in _AGAIN:
        assert mean_distance(unrounded, logits_of(model)) < _ROUNDED_AGAIN
        assert mean_distance(by_default, logits_of(model)) < _ROUNDED_AGAIN
    else:
        assert distance(unrounded, logits_of(model)) < ENGINES
        assert mean_distance(by_default, expected) < _ROUNDED_TOKENS


@pytest.mark.slow
def test_the_command_line_takes_a_file(tmp_path: Path) -> None:
    """The shipped model as a file of BF16: its tokenizer and its bits, so the same text as from its directory."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    path = tmp_path / "bard.gguf"
    write_gguf(path, auto.from_pretrained(BARD), "BF16", add=lambda writer: add_tokenizer(writer, BARD, "gpt-2"))

    def llmc_run(model: Path) -> str:
        words = ["run", str(model), "--prompt", "KING RICHARD:", "--max-tokens", "64", "--temperature", "0"]
        return subprocess.run([sys.executable, "-m", "llmc", *words], capture_output=True, text=True, check=True).stdout

    assert llmc_run(path) == llmc_run(BARD)
