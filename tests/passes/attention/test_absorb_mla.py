"""What keys and values are made of is cached in their place, unless something needs them as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from llmc.architectures.tiny_config import tiny_architecture
from llmc.codegen.cpp.lowering import lower
from llmc.frontends.capture import capture
from llmc.graph.call_arguments import call_arguments
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import Adaptable, ModelGraph
from llmc.graph.render import render
from llmc.options import BuildOptions
from llmc.passes.attention.absorb_mla import absorb_mla
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import built_in, canonical, serving
from llmc.passes.runner import run_pipeline
from llmc.targets import CPU_TARGETS
from tests.graph_builder import GraphBuilder, TensorSource
from tests.passes.pass_checks import rewrites, same_logits
from tests.quick_sample import quick_sample
from tests.tiny_models import saved, tiny_tokens

aten = torch.ops.aten
HEADS, OWN, SHARED, VALUES, RANK = 3, 4, 2, 3, 5
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1")


def latent_attention(
    *,
    bias: bool = False,
    rank: int = RANK,
    shared_first: bool = False,
    joined_queries: bool = True,
    query_heads: int = HEADS,
    is_squashed: bool = False,
    **options: Any,
) -> tuple[ModelGraph, TensorSource]:
    """An attention block whose keys and values come from one product of a latent."""
    b = GraphBuilder()
    h = b.embedded()
    latent, shared = b.linear(h, "down", rank), b.call(aten.unsqueeze.default, b.linear(h, "rotary", SHARED), 1)
    up = b.linear(latent, "kv_b", HEADS * (OWN + VALUES), bias=bias)
    up = b.call(aten.tanh.default, up) if is_squashed else up
    kv = b.call(aten.reshape.default, up, [-1, HEADS, OWN + VALUES])
    keys, values = b.call(aten.slice.Tensor, kv, 2, 0, OWN), b.call(aten.slice.Tensor, kv, 2, OWN, OWN + VALUES)
    parts = [keys, b.call(aten.expand.default, shared, [-1, HEADS, -1])]
    key = b.call(aten.cat.default, parts[::-1] if shared_first else parts, 2)
    query = b.call(
        aten.reshape.default, b.linear(h, "q", query_heads * (OWN + SHARED)), [-1, query_heads, OWN + SHARED]
    )
    if joined_queries:
        at = SHARED if shared_first else OWN
        cut = [b.call(aten.slice.Tensor, query, 2, *span) for span in ((0, at), (at, OWN + SHARED))]
        query = b.call(aten.cat.default, cut, 2)
    attention = b.call(torch.ops.llmc.attention.default, query, key, values, 0.4, **options)
    out = b.linear(b.call(aten.reshape.default, attention, [-1, query_heads * VALUES]), "out", 8)
    return b.finish(b.call(aten.add.Tensor, h, out))


def absorbed(graph: ModelGraph, source: TensorSource, options: BuildOptions | None = None) -> ModelGraph:
    result = run_pipeline(graph, (absorb_mla,), options or BuildOptions())
    assert rewrites(result.records) == 1
    assert rewrites(run_pipeline(result.graph, (absorb_mla,), BuildOptions()).records) == 0
    same_logits(graph, run_pipeline(result.graph, serving(), BuildOptions()).graph, source, tolerance=1e-5)
    return result.graph


def reason(graph: ModelGraph, options: BuildOptions | None = None) -> str:
    result = run_pipeline(graph, (absorb_mla,), options or BuildOptions())
    assert rewrites(result.records) == 0
    (refusal,) = (entry for record in result.records for entry in record.refusals)
    return refusal.reason


def test_absorbs_both_halves(golden: Callable[[str, str], None]) -> None:
    golden("passes/absorb_mla.txt", render(absorbed(*latent_attention())))


@pytest.mark.parametrize("shared_first", [False, True])
@pytest.mark.parametrize("joined_queries", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 3, "softcap": 2.0}])
def test_any_order_of_parts_and_any_way_to_score(
    shared_first: bool, joined_queries: bool, options: dict[str, Any]
) -> None:
    absorbed(*latent_attention(shared_first=shared_first, joined_queries=joined_queries, **options))


def test_a_bias_is_refused() -> None:
    assert reason(latent_attention(bias=True)[0]) == "keys and values have a bias, kv_b_bias"


def test_a_latent_that_is_no_smaller_is_refused() -> None:
    said = reason(latent_attention(rank=25)[0])
    assert said == "the latent and what is shared have 27 channels, keys and values no more: 27"


def test_a_rule_for_the_product_is_kept() -> None:
    options = BuildOptions(quantize=("kv_b=int8",))
    assert reason(latent_attention()[0], options) == "quantize names kv_b by 'kv_b'"
    absorbed(*latent_attention(), BuildOptions(quantize=("int8", "kv_b=none")))


def test_what_is_absorbed_is_not_quantized_with_the_rest(tmp_path: Path) -> None:
    """llama.cpp#11446, sglang#29113: kv_b stays bf16 or wider, since whatever it is off goes into every score."""
    model = tiny_architecture("deepseek_v3").to(torch.bfloat16)
    options = BuildOptions(quantize=("int8",))
    captured = capture(saved(model, tmp_path), options)
    graph = run_pipeline(captured.graph, built_in(), options, data=ModelData(captured.source)).graph
    assert any("q_b_proj" in weight.module for weight in graph.quantized)
    assert not any("kv_b_proj" in weight.module for weight in graph.quantized)
    products = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.head_linear.default)
    assert len(products) == 2 * model.config.num_hidden_layers
    for node in products:
        weight = call_arguments(node)["weight"]
        assert "kv_b_proj" in weight.name and weight.meta["val"].dtype in (torch.bfloat16, torch.float32)


def test_a_product_that_adapters_change_is_kept() -> None:
    graph, _ = latent_attention()
    graph.adaptable = (Adaptable("kv_b", RANK, HEADS * (OWN + VALUES)),)
    assert reason(graph) == "adapters may change kv_b while the engine runs"


def test_a_computed_weight_is_refused() -> None:
    graph, _ = latent_attention()
    (up,) = (n for n in graph.graph.find_nodes(op="placeholder") if n.name.startswith("kv_b"))
    with graph.graph.inserting_after(graph.graph.find_nodes(op="placeholder")[-1]):
        doubled = graph.graph.call_function(aten.mul.Tensor, (up, 2.0))
    doubled.meta["val"] = up.meta["val"]
    up.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    assert reason(graph).endswith("is computed in the step, not a weight")


def test_keys_of_two_products_are_no_candidate() -> None:
    b = GraphBuilder()
    h = b.embedded()
    q, k, v = (b.call(aten.reshape.default, b.linear(h, name, 8), [-1, 2, 4]) for name in "qkv")
    attention = b.call(torch.ops.llmc.attention.default, q, k, v, 0.5)
    none_found(b.finish(b.linear(b.call(aten.reshape.default, attention, [-1, 8]), "out", 8))[0])


def test_what_is_computed_from_a_product_is_no_candidate() -> None:
    none_found(latent_attention(is_squashed=True)[0])


def none_found(graph: ModelGraph) -> None:
    (record,) = run_pipeline(graph, (absorb_mla,), BuildOptions()).records
    assert not record.rewrites and not record.refusals


def latent_nodes(graph: ModelGraph) -> list[fx.Node]:
    paged = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_attention.default)
    return [node for node in paged if call_arguments(node)["latent"]]


@pytest.mark.parametrize("family", quick_sample(LATENT, ("deepseek_v3",)))
def test_the_cache_holds_the_latent_and_what_is_rotated(family: str, tmp_path: Path) -> None:
    model = tiny_architecture(family)
    captured = capture(saved(model, tmp_path), BuildOptions())
    before = run_pipeline(captured.graph, canonical(), BuildOptions()).graph
    after = run_pipeline(captured.graph, built_in(), BuildOptions()).graph
    assert len(latent_nodes(after)) == len(after.caches) == model.config.num_hidden_layers
    for cache in after.caches:
        channels = cache.kv_heads * (cache.width("k") + cache.width("v"))
        assert channels == model.config.kv_lora_rank + model.config.qk_rope_head_dim
    launches = lower(after, CPU_TARGETS[0], BuildOptions()).program.launches
    assert sum(launch.family == "head_linear" for launch in launches) == 2 * len(after.caches)
    for length in (1, 7, 33, 70):
        tokens = tiny_tokens(length)
        expected = run_tokens(before, captured.source, tokens)
        logits = run_tokens(after, captured.source, tokens, chunk_sizes=(min(5, length), length - min(5, length)))
        assert float((logits - expected).abs().max()) <= 1e-5 * float(expected.max() - expected.min())
