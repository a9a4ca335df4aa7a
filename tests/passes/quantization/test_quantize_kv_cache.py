"""The KV cache as codes: every op that uses it is told, and the logits stay close."""

from __future__ import annotations

import pytest
import torch

from llmc.errors import OptionError
from tests.passes.quantization.quantizing import captured_llama, logit_error, logits, optimized


@pytest.mark.parametrize(("format", "error"), [("int8", 0.02), ("fp8", 0.1), ("int4:head", 0.3), ("int4:g8", 0.2)])
def test_logits_stay_close(format: str, error: float) -> None:
    graph = optimized("", kv_cache=format).graph
    assert error / 20 < logit_error(graph) < error
    assert {str(cache.format) for cache in graph.caches} == {format}
    assert all(cache.dtype is torch.uint8 for cache in graph.caches)


@pytest.mark.parametrize(("format", "error"), [("int4:head:rotated", 0.3), ("int8:g8:rotated", 0.02)])
def test_rotated_heads_say_the_same(format: str, error: float) -> None:
    graph = optimized("", kv_cache=format).graph
    assert logit_error(graph) < error
    assert {str(cache.format) for cache in graph.caches} == {format}
    attentions = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_attention.default)
    writes = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.kv_write.default)
    rotate = torch.ops.llmc.rotate_heads.default
    assert len(attentions) == len(writes) == len(graph.caches)
    for attention, write in zip(attentions, writes, strict=True):
        assert [user.target for user in attention.users] == [rotate]
        assert {attention.args[0].target, write.args[0].target, write.args[1].target} == {rotate}


def test_keys_and_values_in_different_formats() -> None:
    """Coarse codes of values lose less than those of both."""
    graph = optimized("", kv_cache="int8/int4:g8:rotated").graph
    assert {str(cache.format) for cache in graph.caches} == {"int8/int4:g8:rotated"}
    assert {(cache.width("k"), cache.width("v")) for cache in graph.caches} == {(16 + 2, 8 + 2 * 4)}
    assert logit_error(graph) < logit_error(optimized("", kv_cache="int4:g8:rotated").graph)


def test_steps_one_by_one_read_what_earlier_ones_wrote() -> None:
    from llmc.graph.execute import run_tokens
    from tests.passes.quantization.quantizing import TOKENS

    graph, source = optimized("", kv_cache="int8").graph, captured_llama().source
    stepped = run_tokens(graph, source, TOKENS, chunk_sizes=[7, *[1] * (len(TOKENS) - 7)])
    torch.testing.assert_close(stepped, logits(graph), rtol=0, atol=1e-3)


def test_refuses_groups_that_do_not_divide_a_head() -> None:
    with pytest.raises(OptionError, match="keys of layer 0 have 16 channels, which int4:g32 does not divide"):
        optimized("", kv_cache="int4")


def test_refuses_groups_that_do_not_divide_values() -> None:
    with pytest.raises(OptionError, match="values of layer 0 have 16 channels, which int4:g32 does not") as caught:
        optimized("", kv_cache="int8/int4")
    assert caught.value.fix == "give each head one scale: kv_cache=int8/int4:head"


@pytest.mark.parametrize(("rows", "pairs"), [(63, 2), (64, 1), (100, 1)])
def test_layers_that_read_no_older_rows_have_no_codes(rows: int, pairs: int) -> None:
    """The reason is given for each of them, once."""
    result = optimized("", kv_cache=f"int8:recent={rows}", max_model_len=64)
    layers = {cache.layer for cache in result.graph.caches}
    reasons = [refusal.reason for record in result.records for refusal in record.refusals if "older" in refusal.reason]
    own = len(layers) // pairs
    expected = [] if pairs == 2 else [f"its layer reads no row older than the newest {rows}, except pinned ones"] * own
    assert reasons == expected
    assert [cache.format is None for cache in result.graph.caches] == ([False, True] if pairs == 2 else [True]) * own
