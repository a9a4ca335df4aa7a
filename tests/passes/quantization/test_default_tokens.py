"""A scheme that does not say how tokens are rounded leaves that to the target: by groups of channels, or whole."""

from __future__ import annotations

import pytest
import torch

from llmc.codegen.target_kind import kind_of
from llmc.formats.code_format import TOKEN_GROUP
from llmc.formats.scheme_text import parse_scheme
from llmc.formats.schemes import SCHEMES, TokenDefault
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import quantization
from llmc.passes.runner import run_pipeline
from llmc.targets import resolve_target
from tests.passes.quantization.quantizing import captured_llama

_BY_INTEGERS = [name for name, scheme in SCHEMES.items() if scheme.activation == "int8"]
_GPU = "h100"


def quantized_for(target: str, quantize: str) -> ModelGraph:
    captured, kind = captured_llama(), kind_of(resolve_target(target))
    data = ModelData(captured.source, tokens=kind.tokens)
    return run_pipeline(captured.graph, quantization(), parse_options({"quantize": quantize}), data=data).graph


def token_groups(graph: ModelGraph) -> set[int | None]:
    rounded = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.round_tokens.default)
    return {call_arguments(node)["group"] for node in rounded}


@pytest.mark.parametrize(
    ("target", "quantize", "groups"),
    [
        ("cpu", "w4a8:g32", {TOKEN_GROUP}),
        ("reference", "w8a8", {TOKEN_GROUP}),
        ("onnxruntime", "w8a8", {TOKEN_GROUP}),
        (_GPU, "w4a8:g32", {TOKEN_GROUP}),
        (_GPU, "w4a8:g32:xrow", {None}),
        (_GPU, "q4_k", set()),
        ("cpu", "w4a8:g32:xrow", {None}),
        ("cpu", "w8a8,down_proj=w8a8:xrow", {None, TOKEN_GROUP}),
        ("cpu", "fp8-w8a8", {None}),
    ],
)
def test_each_target_rounds_tokens_its_own_way_unless_told(target: str, quantize: str, groups: set[int | None]) -> None:
    """The output projection as the others."""
    assert token_groups(quantized_for(target, quantize)) == groups


def test_the_table_says_how_tokens_are_rounded() -> None:
    for target in ("cpu", _GPU):
        schemes = {weight.module: weight.scheme for weight in quantized_for(target, "w4a8").quantized}
        assert schemes["model.layers.0.mlp.down_proj"] == "w4a8:x32" and schemes["lm_head"] == "w8a8:x32"


@pytest.mark.parametrize("name", _BY_INTEGERS)
def test_every_scheme_of_rounded_tokens_has_both(name: str) -> None:
    plain, groups, whole = (parse_scheme(name + option) for option in ("", ":x32", ":xrow"))
    assert plain is not None and plain.on_target(TokenDefault(rounds_plain=True)) == groups
    assert whole is not None and whole.on_target(TokenDefault(rounds_plain=True)) == whole and whole.token_group is None
    static = parse_scheme(f"{name}:static")
    assert static is not None and static.on_target(TokenDefault(rounds_plain=True)) == static
