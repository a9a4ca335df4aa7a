"""onnxruntime-genai runs what is exported for it, and chooses the tokens that the graph does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import llmc
from llmc.api.build_stages import Stages
from llmc.codegen.onnx.model_files import write_model_files
from llmc.debug.onnx_oracle import nothing
from llmc.errors import LoweringError, OptionError
from llmc.exporter import graph_at
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import run_tokens
from llmc.graph.stage import Stage
from llmc.options import BuildOptions, parse_options
from llmc.passes.pipeline import default
from tests.plain_modules import sdpa_decoder
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_tokens

genai: Any = pytest.importorskip("onnxruntime_genai", exc_type=ImportError)
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "mixtral", "phi3", "cohere", "qwen3")
# Schemes whose codes MatMulNBits has, with zeros and without.
CODED = [
    *(("llama", scheme) for scheme in ("int4:g32:asym", "int4:g32", "int8:g32")),
    *(("phi3", "int4:g64"), ("qwen2", "int4:g64")),
]
NEW = 24


def by_genai(directory: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens after a prompt."""
    model = genai.Model(str(directory))
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + NEW, do_sample=False)
    generator = genai.Generator(model, params)
    generator.append_tokens(prompt)
    tokens: list[int] = []
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens


@pytest.mark.parametrize(
    ("family", "quantize"),
    quick_sample([*((family, "none") for family in FAMILIES), *CODED], [("llama", "int4:g32:asym")]),
)
def test_greedy_tokens_are_those_of_the_graph(family: str, quantize: str, tmp_path: Path) -> None:
    # No token ends the text, so that windows are left behind.
    sizes: dict[str, Any] = {"intermediate_size": 128} if quantize != "none" else {}
    checkpoint = tiny_checkpoint(family, tmp_path / "model", eos_token_id=159, **sizes)
    report = llmc.export(checkpoint, tmp_path / "out", flavour="genai", quantize=quantize)
    actual = by_genai(tmp_path / "out", tiny_tokens(9))
    options = parse_options({"dtype": "float32", "quantize": quantize})
    model = capture(checkpoint, options)
    graph = graph_at(model, Stage.CANONICAL, options, default(), Stages(None))
    tokens = tiny_tokens(9)
    for _ in actual:
        tokens.append(int(run_tokens(graph, model.source, tokens)[-1].argmax()))
    assert actual == tokens[9:]
    assert len(actual) == NEW or actual[-1] == 159
    onnx.checker.check_model(report.path / "model.onnx")
    model = onnx.load(report.path / "model.onnx", load_external_data=False)
    own = [node.op_type for node in model.graph.node if node.domain == "com.microsoft"]
    if family == "llama":
        assert own.count("SkipSimplifiedLayerNormalization") == 4
        assert own.count("MatMulNBits") == (0 if quantize == "none" else 15)
    assert "GroupQueryAttention" in {node.op_type for function in model.functions for node in function.node}


def test_what_it_cannot_do_is_named(captured: Callable[[str], Captured], tmp_path: Path) -> None:
    module = sdpa_decoder().to(torch.float32)
    with pytest.raises(LoweringError, match="keeps caches itself, and a serving graph has its own"):
        llmc.export(module, tmp_path / "out", stage="serving", flavour="genai")
    model = captured("falcon_h1")
    graph = graph_at(model, Stage.CANONICAL, BuildOptions(dtype="float32"), default(), Stages(None))
    with pytest.raises(LoweringError, match="onnxruntime-genai keeps no state for it"):
        write_model_files(graph, model.source, tmp_path, nothing, for_genai=True)
    with pytest.raises(OptionError, match="'tea' is not a flavour"):
        llmc.export(module, tmp_path / "out", flavour="tea")  # type: ignore[arg-type]
