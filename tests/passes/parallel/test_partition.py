"""Each rank computes with a part of the weights, and all of them together what one does with all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from llmc.architectures.tiny_config import tiny_architecture
from llmc.errors import PassError
from llmc.frontends.capture import capture
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import op_name, render
from llmc.graph.weights import Derived, PerRank, WeightSource, evaluate
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import built_in, parallel, quantization, serving
from llmc.passes.rewrite import Pass
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.family_captures import FamilyCaptures
from tests.graph_builder import GraphBuilder, TensorSource, llama
from tests.passes.pass_checks import rewrites
from tests.passes.quantization.quantizing import captured_llama
from tests.quick_sample import quick_sample
from tests.tiny_models import FAMILIES, saved, tiny_tokens

aten, ops = torch.ops.aten, torch.ops.llmc
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def cut(
    graph: ModelGraph,
    ranks: int,
    passes: Sequence[Pass] | None = None,
    source: WeightSource | None = None,
    **options: Any,
) -> PipelineResult:
    """The graph for so many ranks."""
    chosen = BuildOptions(tensor_parallel_size=ranks, **options)
    data = None if source is None else ModelData(source)
    return run_pipeline(graph, parallel() if passes is None else passes, chosen, data=data)


def close(before: ModelGraph, after: ModelGraph, source: WeightSource, tokens: Sequence[int] = TOKENS) -> None:
    """The same logits but for the order of sums."""
    expected, actual = run_tokens(before, source, tokens), run_tokens(after, source, tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.max() - expected.min()))


def count(graph: ModelGraph, name: str) -> int:
    """How often an op occurs."""
    return Counter(op_name(n.target) for n in graph.graph.nodes if n.op == "call_function")[name]


def test_a_llama_on_two_ranks(golden: Callable[[str, str], None]) -> None:
    graph, source = llama(layers=1)
    result = cut(graph, 2)
    golden("passes/partition.txt", render(result.graph))
    close(graph, result.graph, source)
    assert rewrites(cut(result.graph, 2).records) == 0


def test_one_rank_changes_nothing() -> None:
    graph, _ = llama()
    assert rewrites(cut(graph, 1).records) == 0


# Between them they have all that is cut; the others of the 48 are with the slow tests.
QUICK = {("llama", 4), ("gemma3_text", 2), ("gpt2", 3), ("phi3", 3), ("cohere", 2)}


@pytest.mark.parametrize(
    ("family", "ranks"),
    quick_sample([(family, ranks) for family in FAMILIES for ranks in (2, 3, 4)], QUICK),
)
def test_families(family: str, ranks: int, captured_family: FamilyCaptures) -> None:
    """Whole models from aten to the optimized graph, with a prompt in two chunks through caches of each rank's own."""
    captured = captured_family(family).captured
    alone, together = (
        run_pipeline(captured.graph, built_in(), BuildOptions(tensor_parallel_size=n)).graph for n in (1, ranks)
    )
    assert together.ranks == ranks
    tokens = tiny_tokens(33)
    expected, actual = (run_tokens(graph, captured.source, tokens, chunk_sizes=(20, 13)) for graph in (alone, together))
    assert float((actual - expected).abs().max()) <= 1e-4 * float(expected.max() - expected.min())
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_latent_attention(ranks: int, tmp_path: Path) -> None:
    """Heads are cut, with what each makes of the latent; the latent is every rank's, and so is the cache of it."""
    tiny_architecture("deepseek_v3").save_pretrained(tmp_path)
    captured = capture(tmp_path, BuildOptions())
    alone, together = (
        run_pipeline(captured.graph, built_in(), BuildOptions(tensor_parallel_size=n)).graph for n in (1, ranks)
    )
    close(alone, together, captured.source)
    shapes = {node.name: tuple(node.meta["val"].shape) for node in together.weight_nodes()}
    heads = -(-4 // ranks)
    assert shapes["model_layers_0_self_attn_q_b_proj_weight"] == (heads * 24, 16)
    for part in ("keys", "values"):
        assert shapes[f"model_layers_0_self_attn_kv_b_proj_weight_{part}"] == (heads, 16, 16)
    assert all((cache.kv_heads, cache.head_dim, cache.value_dim) == (1, 8, 16) for cache in together.caches)
    assert shapes["model_layers_0_self_attn_o_proj_weight"] == (64, heads * 16)


def test_slopes_are_cut_with_their_heads(tmp_path: Path) -> None:
    captured = capture(saved(tiny_architecture("bloom"), tmp_path), BuildOptions())
    alone, together = (
        run_pipeline(captured.graph, built_in(), BuildOptions(tensor_parallel_size=n)).graph for n in (1, 2)
    )
    close(alone, together, captured.source)
    (slopes,) = (node for node in together.weight_nodes() if node.name == "slopes")
    assert tuple(slopes.meta["val"].shape) == (2,)


def test_every_cut_runs() -> None:
    graph, source = llama(layers=2)
    for stop in range(1, rewrites(cut(graph, 2).records)):
        options = BuildOptions(tensor_parallel_size=2, stop_after=stop)
        close(graph, run_pipeline(graph, parallel(), options).graph, source)


def row_product(*, bias: bool) -> tuple[ModelGraph, TensorSource]:
    """A product whose columns are cut, wide enough that it pays."""
    b = GraphBuilder()
    x = b.embedded()
    inner = b.call(aten.gelu.default, b.linear(x, "up", 64, bias=bias))
    return b.finish(b.linear(inner, "down", 8, bias=bias))


def test_a_bias_is_added_once() -> None:
    """Not once a rank (TGI#1036)."""
    graph, source = row_product(bias=True)
    result = cut(graph, 4).graph
    close(graph, result, source)
    (reduced,) = (n for n in result.graph.nodes if n.target is ops.all_reduce.default and _reads(n, ops.linear.default))
    product = reduced.all_input_nodes[0]
    assert product.args[2] is None
    assert {user.target for user in reduced.users} == {aten.add.Tensor}


def _reads(node: fx.Node, target: object) -> bool:
    return node.all_input_nodes[0].target is target


def test_heads_are_cut_wherever_their_axis_goes() -> None:
    b = GraphBuilder()
    heads = b.call(aten.reshape.default, b.linear(b.embedded(), "up", 64), [-1, 4, 16])
    inner = b.call(aten.gelu.default, b.call(aten.transpose.int, heads, 0, 1))
    merged = b.call(aten.reshape.default, b.call(aten.transpose.int, inner, -2, 0), [-1, 64])
    graph, source = b.finish(b.linear(merged, "down", 8))
    result = cut(graph, 2).graph
    close(graph, result, source)
    shapes = {node.name: tuple(node.meta["val"].shape) for node in result.weight_nodes()}
    assert (shapes["up_weight"], shapes["down_weight"]) == ((32, 8), (8, 32))


def test_query_key_and_value_are_cut_each_by_itself() -> None:
    """Not the merged weight as one (Automodel#1324): a rank would have the query's rows only."""
    b = GraphBuilder()
    x = b.embedded(16)
    merged = b.linear(x, "qkv", 48, bias=True)
    q, k, v = (
        b.call(aten.reshape.default, b.call(aten.slice.Tensor, merged, 1, 16 * i, 16 * i + 16), [-1, 4, 4])
        for i in range(3)
    )
    y = b.call(aten.reshape.default, b.call(ops.attention.default, q, k, v, 0.5), [-1, 16])
    graph, source = b.finish(b.linear(y, "o", 16))
    result = cut(graph, 2).graph
    close(graph, result, source)
    weights = {n.name: tuple(n.meta["val"].shape) for n in result.weight_nodes()}
    assert [weights[f"qkv_weight_{start}"] for start in (0, 16, 32)] == [(8, 16)] * 3


def test_a_norm_over_all_heads_sums_squares_of_all_ranks() -> None:
    """Channels that two ranks have, of a KV head that both read, count once (TensorRT-LLM#10673)."""
    b = GraphBuilder()
    x = b.embedded(16)
    q = b.call(aten.reshape.default, b.rms_norm(b.linear(x, "q", 32), "q_norm"), [-1, 4, 8])
    k = b.call(aten.reshape.default, b.rms_norm(b.linear(x, "k", 16), "k_norm"), [-1, 2, 8])
    v = b.call(aten.reshape.default, b.linear(x, "v", 16), [-1, 2, 8])
    y = b.call(aten.reshape.default, b.call(ops.attention.default, q, k, v, 0.3), [-1, 32])
    graph, source = b.finish(b.linear(y, "o", 16))
    for ranks in (2, 3, 4):
        result = cut(graph, ranks).graph
        close(graph, result, source)
        assert result.ranks == ranks
        assert count(result, "llmc.rms_norm") == 0


def test_a_vocabulary_that_does_not_divide() -> None:
    b = GraphBuilder(vocab_size=1031)
    graph, source = b.finish(b.linear(b.embedded(64), "inner", 64))
    result = cut(graph, 4).graph
    close(graph, result, source, [0, 257, 258, 515, 1030, 773])
    shapes = {n.name: tuple(n.meta["val"].shape) for n in result.weight_nodes()}
    assert shapes["embed"] == (259, 64)  # One row of zeros, for the ids of other ranks.
    assert (count(result, "llmc.all_gather"), count(result, "llmc.all_reduce")) == (1, 1)


def test_no_residual_is_fused_across_a_collective() -> None:
    """It would be added once a rank."""
    graph, source = llama()
    result = cut(graph, 2, (*parallel(), *serving(), *built_in()[-8:])).graph
    close(graph, result, source)
    assert count(result, "llmc.all_reduce") >= 4


@pytest.mark.parametrize("scheme", ["int8", "int4:g32", "int4:g32:asym", "mxfp4", "nf4", "w4a8:g32"])
def test_codes_are_parts_of_those_for_one_rank(scheme: str) -> None:
    """Rounded before they are cut: byte for byte."""
    captured = captured_llama()
    passes = (*quantization(), *parallel())
    alone, together = (cut(captured.graph, ranks, passes, captured.source, quantize=scheme).graph for ranks in (1, 2))
    if scheme != "w4a8:g32":  # Each rank rounds the channels that it has of a row by their own largest.
        close(alone, together, captured.source, list(range(17)))
    cut_codes = 0
    for node in together.weight_nodes():
        recipe = together.weights[node.name]
        if not (isinstance(recipe, PerRank) and node.name in alone.weights):
            continue
        cut_codes += "codes" in node.name
        whole = evaluate(alone.weights[node.name], captured.source)
        for rank, part in enumerate(recipe.recipes):
            assert isinstance(part, Derived)
            _, axis, start, stop, length = part.args
            own = evaluate(recipe, captured.source, rank)
            assert own.shape[axis] == length
            assert torch.equal(own.narrow(axis, 0, stop - start), whole.narrow(axis, start, stop - start))
            assert not own.narrow(axis, stop - start, length - (stop - start)).view(torch.uint8).any()
    assert cut_codes >= 8


def test_what_stays_whole_is_named() -> None:
    """A collective is not worth a thousandth of the model's weights."""
    b = GraphBuilder(vocab_size=20011)
    x = b.embedded(8)
    graph, _ = b.finish(b.call(aten._softmax.default, b.linear(x, "scores", 8), -1, False))
    (record,) = (entry for entry in cut(graph, 2).records if entry.name == "partition")
    assert [r.reason for r in record.refusals] == [
        "scores_weight (8 × 8) stays whole on each of 2 ranks: "
        "exchanging parts between ranks would take longer than reading the whole weight"
    ]


def test_a_single_head_is_said_to_be_one() -> None:
    """Of keys and values; the query heads that read it are cut."""
    b = GraphBuilder()
    x = b.embedded(16)
    heads = {"q": 4, "k": 1, "v": 1}
    q, k, v = (b.call(aten.reshape.default, b.linear(x, n, 16 * h), [-1, h, 16]) for n, h in heads.items())
    y = b.call(aten.reshape.default, b.call(ops.attention.default, q, k, v, 0.3), [-1, 64])
    graph, source = b.finish(b.linear(y, "o", 16))
    result = cut(graph, 4)
    close(graph, result.graph, source)
    (record,) = (candidate for candidate in result.records if candidate.name == "partition")
    reason = "it is a single head, fewer than ranks, and each rank's query heads read all of it"
    assert [r.reason for r in record.refusals] == [
        f"{name}_weight (16 × 16) stays whole on each of 4 ranks: {reason}" for name in "kv"
    ]


def test_nothing_to_cut_is_an_error() -> None:
    b = GraphBuilder(vocab_size=3)
    graph, _ = b.finish(b.call(aten._softmax.default, b.embedded(2), -1, False))
    with pytest.raises(PassError, match="no part of the model can be divided among 2 ranks"):
        cut(graph, 2)
