"""Which C++ kernel computes an llmc:: op: one table."""

from typing import Any

import torch

import llmc.ops  # noqa: F401  (registers the ops that the table names)
from llmc.codegen.cpp.cache_kernels import attended, caching, rotating
from llmc.codegen.cpp.compaction_kernels import (
    expected,
    joined,
    moved,
    scored,
    standing_out,
    sums_kept,
    turned,
    updated,
)
from llmc.codegen.cpp.kernel import Kernel, by_name
from llmc.codegen.cpp.more_arguments import adapted, choosing, of_requests, of_texts, pooled
from llmc.codegen.cpp.products import lookup, of_heads, product, sent
from llmc.codegen.cpp.rank_kernels import among_ranks, gathered
from llmc.codegen.cpp.state_kernels import WIDEST_CONV, WIDEST_KEY, carrying, decays, semiring

_llmc = torch.ops.llmc


KERNELS: dict[Any, Kernel] = {
    _llmc.linear.default: product("linear"),
    _llmc.fused_linear.default: product("linear"),
    _llmc.gated_linear.default: product("gated_linear", gated=True),
    _llmc.lm_head.default: product("lm_head"),
    _llmc.expert_linear.default: product("expert_linear", more=sent),
    _llmc.head_linear.default: of_heads(),
    _llmc.lora.default: by_name("lora", "x[tokens | channels]", more=adapted),
    _llmc.sum_experts.default: by_name("sum_experts", "x[tokens | slots channels]", typed=("x", "weights")),
    _llmc.top_k.default: by_name("top_k", "x[tokens | groups? channels]", results=("values", "index")),
    _llmc.take_channels.default: by_name("take_channels", "x[tokens | channels] index[_ | taken]"),
    _llmc.mark_channels.default: by_name("mark_channels", "index[tokens | marked]", typed=()),
    _llmc.embedding.default: lookup(),
    _llmc.rank_rows.default: by_name("rank_rows", "ids[tokens |]", typed=()),
    _llmc.all_reduce.default: by_name("all_reduce", "x[tokens | channels]", more=among_ranks),
    _llmc.all_gather.default: gathered(),
    _llmc.select_rows.default: by_name("select_rows", "x[_ | channels*] rows[selected |]"),
    _llmc.pool_rows.default: by_name("pool_rows", "x[_ | channels] rows[selected |]", more=pooled),
    _llmc.segments_of_texts.default: by_name("segments_of_texts", "ids[tokens |]", typed=(), more=of_requests),
    _llmc.ragged_attention.default: by_name(
        "ragged_attention",
        "q[tokens | heads head_dim] k[_ | kv_heads _] v[_ | _ value_dim]",
        typed=("q",),
        more=of_texts,
    ),
    _llmc.select_channels.default: by_name("select_channels", "x[tokens | _] order[channels]"),
    _llmc.top_tokens.default: by_name("top_tokens", "logits[rows | _? vocabulary]", results=("ids", "logprobs")),
    _llmc.rms_norm.default: by_name("rms_norm", "x[tokens | groups? channels]"),
    _llmc.layer_norm.default: by_name("layer_norm", "x[tokens | groups? channels]"),
    _llmc.add_rms_norm.default: by_name("rms_norm", "x[tokens | groups? channels]", results=("y", "sum")),
    _llmc.add_layer_norm.default: by_name("layer_norm", "x[tokens | groups? channels]", results=("y", "sum")),
    _llmc.gated_activation.default: by_name("gated_activation", "gate[tokens | channels*]"),
    _llmc.rope_angles.default: by_name(
        "rope_angles", "positions[tokens |] inv_freq[half]", results=("cos", "sin"), typed=()
    ),
    _llmc.rope.default: by_name("rope", "x[tokens | heads head_dim] cos[_ | half]", in_place=(("x", 0),)),
    _llmc.rotate_heads.default: rotating(),
    _llmc.kv_write.default: caching("kv_write", "k[tokens | kv_heads head_dim] v[_ | _ value_dim]", results=()),
    _llmc.rope_kv_write.default: caching(
        "kv_write",
        "q[tokens | heads head_dim] k[_ | kv_heads _] v[_ | _ value_dim] cos[_ | half]",
        results=("q_out",),
        in_place=(("q", 0),),
    ),
    _llmc.paged_attention.default: caching(
        "paged_attention", "q[tokens | heads head_dim]", results=("y",), more=attended
    ),
    _llmc.paged_choose_keys.default: by_name(
        "paged_choose_keys", "q[tokens | heads head_dim]", typed=("q", "k_cache"), more=choosing
    ),
    _llmc.score_keys.default: scored(),
    _llmc.sum_attention.default: updated("sum_attention"),
    _llmc.last_uses.default: updated("last_uses"),
    _llmc.peak_attention.default: updated("peak_attention"),
    _llmc.score_leverage.default: standing_out(),
    _llmc.score_expected.default: expected(),
    _llmc.join_scores.default: joined(),
    _llmc.keep_sums.default: sums_kept(),
    _llmc.compact_kv.default: moved(),
    _llmc.turn_rows.default: turned(),
    _llmc.causal_conv_with_state.default: carrying(
        "causal_conv", "x[_ | channels] weight[width _]", typed=None, widest=("weight", 0, WIDEST_CONV)
    ),
    _llmc.selective_scan_with_state.default: carrying("selective_scan", "x[_ | channels] A[_ n]"),
    _llmc.linear_attention_with_state.default: carrying(
        "linear_attention",
        "k[_ | groups key_dim] v[_ | heads value_dim]",
        more=decays,
        widest=("k", 2, WIDEST_KEY),
    ),
    _llmc.linear_recurrence_with_state.default: carrying("linear_recurrence", "x[_ | channels]", more=semiring),
}
