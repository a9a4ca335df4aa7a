"""Explain, diff and bisect on a pipeline that quantizes: coverage, errors against budgets, a planted wrong scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.debug.bisect import Culprit, Outcome, Pipeline, bisect, cut_graph, outline
from llmc.debug.cut_checks import LogitCheck
from llmc.debug.explain_model import explain_model
from llmc.debug.memo_run import MemoRun, default_chunks
from llmc.debug.pass_diff import diff_passes
from llmc.debug.region import changed_region
from llmc.debug.reproduction import write_reproduction
from llmc.errors import PassError
from llmc.frontends.captured import Captured
from llmc.graph.call_arguments import call_arguments
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Derived
from llmc.options import BuildOptions
from llmc.passes import GraphPass, Numerics, Pass, RewriteLog, default, extended
from llmc.report.coverage.coverage import Coverage, check_complete
from tests.family_captures import FamilyCaptures
from tests.tiny_models import tiny_tokens

aten, ops = torch.ops.aten, torch.ops.llmc
QUANTIZED = BuildOptions(quantize=("int8",), kv_cache="int8")
TOKENS = tiny_tokens(21)


@pytest.fixture
def llama(captured_family: FamilyCaptures) -> Captured:
    return captured_family("llama").captured


def coverage(captured: Captured, options: BuildOptions, *added: Pass) -> dict[str, Coverage]:
    explanation = explain_model(captured, extended(*added) if added else default(), options)
    assert explanation.error is None
    check = {f"{part.what} {part.verb}": part for part in explanation.coverage}
    return {name: part for name, part in check.items() if "quantized" in name or "codes" in name}


def test_products_and_caches_are_counted(llama: Captured) -> None:
    parts = coverage(llama, QUANTIZED)
    assert [str(part) for part in parts.values()] == [
        "15 of 15 products quantized",
        "9 of 9 readers of quantized weights computed on their codes",
        "2 of 2 KV caches quantized",
    ]
    assert coverage(llama, BuildOptions()) == {}


def test_what_the_user_leaves_alone_is_no_shortfall(llama: Captured) -> None:
    options = BuildOptions(quantize=("int8", "*.layers.0.*=none"))
    products = coverage(llama, options)["products quantized"]
    assert str(products) == "8 of 15 products quantized; 7 left alone as requested"
    assert products.reasons(products.left[0]) == ("*.layers.0.*=none leaves model.layers.0.self_attn.q_proj alone",)
    check_complete([products])
    only = coverage(llama, BuildOptions(quantize=("*.down_proj=int8",)))["products quantized"]
    assert str(only) == "2 of 15 products quantized; 13 left alone as requested"
    assert only.reasons(only.left[0])[0].startswith("no rule names model.layers.0.self_attn.q_proj")


def test_a_shortfall_is_refused_by_name_and_fails_a_strict_build(llama: Captured) -> None:
    missing = BuildOptions(quantize=("int8",), disable_passes=("quantize_weights",))
    products = coverage(llama, missing)["products quantized"]
    assert str(products) == "0 of 15 products quantized; 15 left over"
    with pytest.raises(PassError, match="0 of 15 products quantized"):
        check_complete([products])

    def plus_nothing(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
        node = graph.graph.find_nodes(op="call_function", target=ops.dequantize.default)[-1]
        log.step(f"add nothing to {node.name}", node)
        with graph.graph.inserting_after(node):
            graph.graph.call_function(aten.add.Tensor, (node, 0))
        node.replace_all_uses_with(node.next, delete_user_cb=lambda user: user is not node.next)

    spoiler = GraphPass("plus_nothing", plus_nothing, Numerics.EXACT, after="page_kv_cache")
    options = BuildOptions(quantize=("int8",), allow_fallback=("quantized",))
    readers = coverage(llama, options, spoiler)["readers of quantized weights computed on their codes"]
    assert str(readers) == "8 of 9 readers of quantized weights computed on their codes; 1 refused"
    ((refusal,),) = [left.refusals for left in readers.left]
    assert refusal.op.startswith("aten.add") and "reads the dequantized dequantize" in refusal.reason


def test_each_quantization_pass_shows_its_error_against_its_budget(llama: Captured) -> None:
    differences = diff_passes(llama, default(), QUANTIZED, TOKENS)
    assert differences.first_over is None and differences.error is None
    by_name = {pass_.name: pass_ for pass_ in differences.passes}
    weights, caches = by_name["quantize_weights"], by_name["quantize_kv_cache"]
    assert (weights.numerics, weights.count, weights.budget) == ("lossy", 15, 2.0)
    assert (caches.numerics, caches.count) == ("lossy", 2)
    for difference in (weights, caches):
        assert difference.difference is not None and 1e-4 < difference.difference.relative < 0.5
    assert "multiply_unrounded" not in by_name, "in fp32 nothing is rounded on the way"


def _multiply_scales(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    for node in graph.graph.find_nodes(op="call_function", target=ops.dequantize.default):
        reader = next(iter(node.users))
        log.step(f"scales of {reader.name}", reader)
        scales = call_arguments(node)["scales"].name
        factor = 4.0 if reader.name == "linear_40" else 1.0
        graph.weights[scales] = Derived(aten.mul.Tensor, (graph.weights[scales], factor))


wrong_scales = GraphPass("wrong_scales", _multiply_scales, Numerics.EXACT, after="quantize_weights")


def test_a_wrong_scale_is_found_behind_what_quantization_may_change(llama: Captured, tmp_path: Path) -> None:
    options = BuildOptions(quantize=("int8",))
    differences = diff_passes(llama, extended(wrong_scales), options, TOKENS, by_rewrite=True)
    assert differences.first_over is not None and differences.first_over.name == "wrong_scales"
    guilty = [r for r in differences.first_over.rewrites if r.difference is not None and not r.difference.is_zero]
    assert [r.rewrite.nodes for r in guilty] == [("linear_40",)]

    pipeline = Pipeline(llama, extended(wrong_scales), options)
    runner = MemoRun(llama.source, TOKENS, chunk_sizes=default_chunks(len(TOKENS)), block_size=options.block_size)
    whole = outline(pipeline)
    ((first, budget),) = whole.lossy(llama.graph.info.dtype)
    assert whole.at(first)[0] == "quantize_weights" and budget == 2.0
    check = LogitCheck(pipeline, runner, runner.logits(llama.graph), 1e-4, ((first, 0.2),))
    culprit = bisect(whole, check)
    assert culprit.pass_name == "wrong_scales" and culprit.rewrite is not None
    assert culprit.rewrite.nodes == ("linear_40",)

    before, after = cut_graph(pipeline, culprit.good), cut_graph(pipeline, culprit.bad)
    piece = changed_region(before, after, runner, llama.source)
    assert [node.name for node in piece.after.nodes] == ["dequantize_10"], "the rest is the same"
    made = write_reproduction(tmp_path / "found", culprit, before, after, piece, ["llmc", "bisect"])
    assert made.error is None and made.local is not None and made.local.relative > 1.0
    assert ".after'].clone()" in (tmp_path / "found" / "repro.py").read_text()


@pytest.mark.parametrize("name", ["quantize_weights", "quantize_kv_cache"])
def test_what_a_rewrite_of_quantization_does_is_shown_by_itself(llama: Captured, name: str, tmp_path: Path) -> None:
    pipeline = Pipeline(llama, default(), QUANTIZED)
    runner = MemoRun(llama.source, TOKENS, chunk_sizes=default_chunks(len(TOKENS)), block_size=QUANTIZED.block_size)
    whole = outline(pipeline)
    number = next(last for pass_name, _, last in whole.spans() if pass_name == name)
    before, after = cut_graph(pipeline, number - 1), cut_graph(pipeline, number)
    piece = changed_region(before, after, runner, llama.source)
    culprit = Culprit(name, "lossy", whole.at(number)[1], number - 1, number, Outcome(False, ""), ())
    made = write_reproduction(tmp_path / "found", culprit, before, after, piece, ["llmc", "bisect"])
    assert made.error is None and made.local is not None
    assert 0 < made.local.relative < 0.3


def test_values_of_codes_are_those_of_a_plain_run(llama: Captured) -> None:
    pipeline = Pipeline(llama, default(), QUANTIZED)
    runner = MemoRun(llama.source, TOKENS, chunk_sizes=(len(TOKENS),), block_size=QUANTIZED.block_size)
    graph = cut_graph(pipeline, len(outline(pipeline).rewrites))
    torch.testing.assert_close(runner.logits(graph), run_tokens(graph, llama.source, TOKENS))
