"""onnxruntime-genai runs what is exported for it, and chooses the tokens that the graph does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import llmc
from llmc.errors import LoweringError, OptionError
from llmc.graph.capture import capture
from llmc.graph.execute import run_tokens
from llmc.options import BuildOptions
from tests.plain_modules import sdpa_decoder
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_tokens

genai: Any = pytest.importorskip("onnxruntime_genai", exc_type=ImportError)
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "mixtral", "phi3", "cohere", "qwen3")
NEW = 24


def by_genai(directory: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens after a prompt."""
    model = genai.Model(str(directory))
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + NEW, do_sample=False)
    generator = genai.Generator(model, params)
    generator.append_tokens(prompt)
    found: list[int] = []
    while not generator.is_done():
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    return found


@pytest.mark.parametrize("family", quick_sample(FAMILIES, ("llama",)))
def test_greedy_tokens_are_those_of_the_graph(family: str, tmp_path: Path) -> None:
    # No token ends the text, so that windows are left behind.
    checkpoint = tiny_checkpoint(family, tmp_path / "model", eos_token_id=159)
    llmc.export(checkpoint, tmp_path / "out", flavour="genai")
    found = by_genai(tmp_path / "out", tiny_tokens(9))
    captured = capture(checkpoint, BuildOptions(dtype="float32"))
    tokens = tiny_tokens(9)
    for _ in found:
        tokens.append(int(run_tokens(captured.graph, captured.source, tokens)[-1].argmax()))
    assert found == tokens[9:]
    assert len(found) == NEW or found[-1] == 159


def test_attention_is_that_of_onnxruntime(tmp_path: Path) -> None:
    report = llmc.export(sdpa_decoder(), tmp_path / "out", flavour="genai")
    onnx.checker.check_model(report.path / "model.onnx")
    model = onnx.load(report.path / "model.onnx", load_external_data=False)
    ops = {node.op_type for function in model.functions for node in function.node}
    assert report.stage == "canonical" and "GroupQueryAttention" in ops


def test_what_it_cannot_do_is_named(tmp_path: Path) -> None:
    module = sdpa_decoder().to(torch.float32)
    with pytest.raises(LoweringError, match="keeps caches itself, and a serving graph has its own"):
        llmc.export(module, tmp_path / "out", stage="serving", flavour="genai")
    with pytest.raises(OptionError, match="'tea' is no flavour"):
        llmc.export(module, tmp_path / "out", flavour="tea")  # type: ignore[arg-type]
