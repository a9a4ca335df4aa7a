"""The coverage rules, in the order of the report, and the ops that no rule covers, with the reason.

Which ops count follows from their records wherever these say it, so that a new product, lookup or state counts without
a line here. A test joins the rules with all ops that canonical and serving graphs may hold.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch._ops import OpOverload

from llmc.graph.op_record import OpRecord, ops_with
from llmc.program import COMPACTION
from llmc.report.coverage.aten import (
    attentions,
    expert_products,
    gates,
    layer_norms,
    rms_norms,
    rotations,
    weight_products,
    whole_norms,
)
from llmc.report.coverage.fusions import (
    ADDING_NORMS,
    activated_products,
    activations_done,
    gated_products,
    merged_reads,
    residual_sums,
    residuals_done,
    rotated_writes,
    selected,
    shared_reads,
    unselected,
)
from llmc.report.coverage.quantized import QUANTIZED_RULES
from llmc.report.coverage.rule import CoverageRule, calls_to, canonical, named, serving

aten, ops = torch.ops.aten, torch.ops.llmc


def _is_product(record: OpRecord) -> bool:
    return record.is_product and not record.is_of_experts


def _keeps_state(record: OpRecord) -> bool:
    return "state" in record.writes


def _begins_from_zero(record: OpRecord) -> bool:
    return record.fallback == "states"


RULES: tuple[CoverageRule, ...] = (
    canonical(
        "attentions",
        "recognised",
        ("fuse_sdpa_attention", "fuse_eager_attention"),
        named(ops.attention.default, ops.bidirectional_attention.default),
        left_nodes=attentions,
    ),
    serving(
        "attentions",
        "paged",
        ("page_kv_cache",),
        named(ops.paged_attention.default),
        named(ops.attention.default),
    ),
    serving(
        "choices of keys",
        "paged",
        ("leave_out_choices", "page_kv_cache"),
        named(ops.paged_choose_keys.default),
        named(ops.choose_keys.default),
    ),
    serving(
        "states",
        "kept between steps",
        ("keep_states",),
        _keeps_state,
        _begins_from_zero,
    ),
    serving(
        "operations over whole texts",
        "separated by text",
        ("batch_texts",),
        named(ops.ragged_attention.default, ops.segments_of_texts.default, ops.pool_rows.default),
        named(ops.bidirectional_attention.default, ops.segments.default, ops.pool.default),
    ),
    canonical(
        "RMSNorms",
        "fused",
        ("fuse_rms_norm", "fuse_rms_norm_without_weight"),
        named(ops.rms_norm.default),
        left_nodes=rms_norms,
        count=whole_norms(ops.rms_norm.default),
    ),
    canonical(
        "LayerNorms",
        "fused",
        ("fuse_layer_norm", "fuse_layer_norm_without_bias", "fuse_layer_norm_without_weight", "fuse_layer_norm_casts"),
        named(ops.layer_norm.default),
        left_nodes=layer_norms,
        count=whole_norms(ops.layer_norm.default),
    ),
    canonical(
        "rotations by position",
        "fused",
        ("fuse_rope_angles", "simplify_repeats", "fuse_rope"),
        named(ops.rope.default),
        left_nodes=rotations,
    ),
    canonical(
        "gated activations",
        "fused",
        ("fuse_gated_activation",),
        named(ops.gated_activation.default),
        left_nodes=gates,
    ),
    canonical(
        "products with a weight",
        "recognised",
        ("fuse_linear", "make_lm_head"),
        _is_product,
        left_nodes=weight_products,
    ),
    canonical(
        "products with experts' weights",
        "recognised",
        ("fuse_expert_linear",),
        lambda record: record.is_of_experts,
        left_nodes=expert_products,
    ),
    canonical(
        "embeddings",
        "recognised",
        ("fuse_embedding",),
        lambda record: record.is_lookup,
        left_nodes=lambda graph: calls_to(graph, aten.embedding.default),
    ),
    serving(
        "outputs",
        "limited to requested rows",
        ("select_logit_rows",),
        named(ops.select_rows.default),
        left_nodes=unselected,
        count=selected,
    ),
    serving(
        "gated products",
        "made one",
        ("fuse_gated_linear",),
        named(ops.gated_linear.default),
        left_nodes=gated_products,
    ),
    serving(
        "activations of a product",
        "fused into it",
        tuple(f"fuse_linear_{name}" for name in ("gelu", "silu", "relu", "sigmoid", "tanh")),
        named(ops.fused_linear.default),
        left_nodes=activated_products,
        count=activations_done,
    ),
    serving(
        "groups of products of one input",
        "merged",
        ("merge_qkv",),
        named(ops.linear.default, ops.fused_linear.default),
        left_nodes=shared_reads,
        count=merged_reads,
    ),
    serving(
        "residual sums",
        "fused",
        ("fuse_linear_residual", "fuse_add_norm"),
        named(ops.fused_linear.default, *ADDING_NORMS),
        left_nodes=residual_sums,
        count=residuals_done,
    ),
    serving(
        "rotations and cache writes",
        "made one",
        ("fuse_rope_kv_write",),
        named(ops.rope_kv_write.default),
        left_nodes=rotated_writes,
    ),
    *QUANTIZED_RULES,
)

_OF_RANKS = "what of a plan for ranks cannot be placed fails the build, or is whole on each rank and said so there"
_OF_ROUTERS = "normalize_routing says a router's choice with it; one that it does not know is not canonical"
WITHOUT_RULE: Mapping[OpOverload, str] = MappingProxyType(
    {
        ops.all_reduce.default: _OF_RANKS,
        ops.all_gather.default: _OF_RANKS,
        ops.hand_over.default: _OF_RANKS,
        ops.rank_rows.default: _OF_RANKS,
        ops.top_k.default: _OF_ROUTERS,
        ops.take_channels.default: _OF_ROUTERS,
        ops.mark_channels.default: _OF_ROUTERS,
        ops.sum_experts.default: "it follows products with experts' weights, which count",
        ops.head_linear.default: "absorb_mla makes it where it can, and refuses each attention where it cannot",
        ops.rope_angles.default: "rotations by its angles count",
        ops.rotate_heads.default: "quantize_kv_cache makes it if the cache format asks for it, or fails",
        ops.kv_write.default: "the paged attention after it is counted instead",
        ops.select_channels.default: "it brings x into the order of a weight's columns, which a file or a plan says",
        **dict.fromkeys(
            ops_with(COMPACTION),
            "place_compaction makes it for every cache of the policy that kv_compression names, or fails",
        ),
        ops.query_means.default: "calibrate_queries makes it for every cache that triattention is to shrink, or fails",
        ops.top_tokens.default: "a head that drafts is given or the build fails",
    }
)
