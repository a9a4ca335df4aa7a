"""What others have got wrong when they cut a model, each as a test. Those of merged and biased products, of norms over
all heads and of codes stand in test_partition.py."""

from __future__ import annotations

import pytest
import torch

from llmc.errors import LlmcError
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import PerRank, evaluate
from llmc.passes.pipeline import parallel, quantization
from tests.graph_builder import GraphBuilder, TensorSource, llama
from tests.passes.parallel.test_partition import TOKENS, close, cut

aten, ops = torch.ops.aten, torch.ops.llmc


def attention(heads: int, kv_heads: int, width: int, head: int = 4) -> tuple[ModelGraph, TensorSource]:
    """One layer of it."""
    b = GraphBuilder()
    x = b.embedded(width)
    q = b.call(aten.reshape.default, b.linear(x, "q", heads * head), [-1, heads, head])
    k, v = (b.call(aten.reshape.default, b.linear(x, n, kv_heads * head), [-1, kv_heads, head]) for n in "kv")
    y = b.call(aten.reshape.default, b.call(ops.attention.default, q, k, v, 0.5), [-1, heads * head])
    return b.finish(b.linear(y, "o", width))


def mlp(inner: int, width: int = 16) -> tuple[ModelGraph, TensorSource]:
    """Two products; the inner channels are the second one's columns."""
    b = GraphBuilder()
    x = b.embedded(width)
    return b.finish(b.linear(b.call(aten.gelu.default, b.linear(x, "up", inner)), "down", width))


def parts_of(graph: ModelGraph, name: str) -> list[int]:
    """How many elements of the cut axis each rank has of its own."""
    recipe = graph.weights[name]
    assert isinstance(recipe, PerRank)
    return [piece.args[3] - piece.args[2] for piece in recipe.recipes]  # type: ignore[union-attr]


@pytest.mark.parametrize("kv_heads", [52, 4, 1])
def test_52_heads_on_8_ranks(kv_heads: int) -> None:
    """Not refused since they do not divide (vllm#2652): some ranks have one less, and zeros in its place."""
    graph, source = attention(52, kv_heads, 64)
    result = cut(graph, 8).graph
    close(graph, result, source)
    assert sorted(parts_of(result, "q_weight"), reverse=True) == [28] * 4 + [24] * 4


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 8), (1, 4), (2, 3)])
def test_fewer_kv_heads_than_ranks(kv_heads: int, ranks: int) -> None:
    """A head is not cut through (TensorRT-LLM#4308, transformers#48307): several ranks keep the same one."""
    graph, source = attention(8, kv_heads, 64, head=32)
    result = cut(graph, ranks).graph
    close(graph, result, source)
    keys = result.weights["k_weight"]
    parts = parts_of(result, "k_weight") if isinstance(keys, PerRank) else [32] * ranks
    assert parts == [32] * ranks


def test_attention_and_mlp_side_by_side() -> None:
    """Of one input and into one sum, so there is no residual between them that tells them apart (TensorRT-LLM#8946):
    each is cut for itself, and their parts are added up once."""
    b = GraphBuilder()
    x = b.embedded(16)
    q, k, v = (b.call(aten.reshape.default, b.linear(x, n, 16), [-1, 4, 4]) for n in "qkv")
    y = b.call(aten.reshape.default, b.call(ops.attention.default, q, k, v, 0.5), [-1, 16])
    heads = b.linear(y, "o", 16)
    inner = b.linear(b.call(aten.gelu.default, b.linear(x, "up", 64)), "down", 16)
    graph, source = b.finish(b.call(aten.add.Tensor, x, b.call(aten.add.Tensor, heads, inner)))
    result = cut(graph, 2).graph
    close(graph, result, source)
    assert [parts_of(result, f"{name}_weight") for name in ("q", "o", "up", "down")] == [
        [8, 8],
        [8, 8],
        [32, 32],
        [32, 32],
    ]


def test_3_ranks() -> None:
    """Whatever the number of GPUs is (vllm#5003)."""
    graph, source = attention(8, 8, 16)
    result = cut(graph, 3).graph
    close(graph, result, source)
    assert parts_of(result, "q_weight") == [12, 12, 8]


@pytest.mark.parametrize(("inner", "ranks", "parts"), [(768, 4, [256, 256, 128, 128]), (384, 2, [256, 128])])
def test_groups_of_128_that_do_not_divide(inner: int, ranks: int, parts: list[int]) -> None:
    """768 on four ranks would be 192 each, a group and a half (vllm#28829), as 384 are on two (vllm#48173)."""
    graph, source = mlp(inner, width=128)
    passes = (*quantization(), *parallel())
    alone, together = (cut(graph, n, passes, source, quantize="int4:g128").graph for n in (1, ranks))
    close(alone, together, source)
    codes = next(name for name in together.weights if "down" in name and "codes" in name)
    assert parts_of(together, codes) == parts


@pytest.mark.parametrize("ranks", [2, 3])
def test_interleaved_channels_stay_together(ranks: int) -> None:
    """b and a of one head lie side by side (vllm#36242): a rank has both of its heads, not the b of all."""
    b = GraphBuilder()
    x = b.embedded(16)
    both = b.call(aten.reshape.default, b.linear(x, "ba", 128), [-1, 64, 2])
    gate, value = (b.call(aten.select.int, both, 2, i) for i in (0, 1))
    graph, source = b.finish(b.linear(b.call(aten.mul.Tensor, b.call(aten.sigmoid.default, gate), value), "o", 16))
    result = cut(graph, ranks).graph
    close(graph, result, source)
    assert all(part % 2 == 0 for part in parts_of(result, "ba_weight"))
    assert sum(parts_of(result, "ba_weight")) == 128


def test_a_sum_is_not_summed_again() -> None:
    """What all ranks have whole is a part of nothing; the graph of all ranks does not run then."""
    graph, source = llama(layers=1)
    result = cut(graph, 2).graph
    reduced = [n for n in result.graph.nodes if n.target is ops.all_reduce.default]
    assert not any(n.all_input_nodes[0] in reduced for n in reduced)
    close(graph, result, source)
    with result.graph.inserting_after(reduced[0]):
        again = result.graph.call_function(ops.all_reduce.default, (reduced[0], 2))
    reduced[0].replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    with pytest.raises(LlmcError, match="called on a single rank"):
        run_tokens(result, source, TOKENS)


def test_ranks_have_parts_of_their_own() -> None:
    """Not all of them that of the first."""
    graph, source = llama(layers=1)
    result = cut(graph, 2).graph
    matrices = [n.name for n in result.weight_nodes() if isinstance(result.weights[n.name], PerRank)]
    first, second = ([evaluate(result.weights[name], source, rank) for name in matrices] for rank in (0, 1))
    assert matrices
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
