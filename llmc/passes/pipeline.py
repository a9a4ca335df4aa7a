"""The order of the passes, read top to bottom."""

from llmc.passes.adapters.insert_adapters import insert_adapters
from llmc.passes.attention.absorb_mla import absorb_mla
from llmc.passes.attention.calibrate_queries import calibrate_queries
from llmc.passes.attention.compress_kv_cache import compress_kv_cache
from llmc.passes.canonical.check_canonical import check_canonical
from llmc.passes.canonical.fold_constants import fold_constants
from llmc.passes.canonical.join_parts import join_parts
from llmc.passes.canonical.make_lm_head import make_lm_head
from llmc.passes.canonical.merge_duplicates import merge_duplicates
from llmc.passes.canonical.normalize_lookups import normalize_lookups
from llmc.passes.canonical.normalize_ops import normalize_ops
from llmc.passes.canonical.normalize_routing import normalize_routing
from llmc.passes.canonical.positions_input import positions_input
from llmc.passes.canonical.remove_batch_axis import remove_batch_axis
from llmc.passes.canonical.remove_export_residue import remove_export_residue
from llmc.passes.canonical.repeat_last import repeat_last
from llmc.passes.canonical.separate_heads import separate_heads
from llmc.passes.canonical.separate_repeats import separate_repeats
from llmc.passes.canonical.separate_streams import separate_streams
from llmc.passes.canonical.simplify_layout import simplify_layout
from llmc.passes.canonical.simplify_repeats import simplify_repeats
from llmc.passes.canonical.unfold_complex import unfold_complex
from llmc.passes.custom import installed, place
from llmc.passes.fusion.from_aten.fuse_eager_attention import fuse_eager_attention
from llmc.passes.fusion.from_aten.fuse_expert_linear import fuse_expert_linear
from llmc.passes.fusion.from_aten.fuse_gated_activation import fuse_gated_activation, fuse_silu, fuse_tanh_gelu
from llmc.passes.fusion.from_aten.fuse_layer_norm import (
    fuse_layer_norm,
    fuse_layer_norm_casts,
    fuse_layer_norm_without_bias,
    fuse_layer_norm_without_weight,
)
from llmc.passes.fusion.from_aten.fuse_linear import fuse_embedding, fuse_linear
from llmc.passes.fusion.from_aten.fuse_rms_norm import fuse_rms_norm, fuse_rms_norm_without_weight
from llmc.passes.fusion.from_aten.fuse_rope import (
    fuse_partial_rope,
    fuse_rope,
    fuse_rope_backwards,
    fuse_rope_casts,
)
from llmc.passes.fusion.from_aten.fuse_rope_angles import fuse_rope_angles
from llmc.passes.fusion.from_aten.fuse_sdpa_attention import fuse_sdpa_attention
from llmc.passes.fusion.fuse_add_norm import fuse_add_norm
from llmc.passes.fusion.fuse_gated_linear import fuse_gated_linear
from llmc.passes.fusion.fuse_linear_activation import fuse_linear_activation
from llmc.passes.fusion.fuse_linear_residual import fuse_linear_residual
from llmc.passes.fusion.fuse_rope_kv_write import fuse_rope_kv_write
from llmc.passes.fusion.merge_qkv import merge_qkv
from llmc.passes.fusion.separate_qkv import separate_qkv
from llmc.passes.parallel.cut_stages import cut_stages
from llmc.passes.parallel.partition import partition
from llmc.passes.parallel.partition_experts import partition_experts
from llmc.passes.parallel.separate_products import separate_products
from llmc.passes.pruning.drop_layers import drop_layers
from llmc.passes.pruning.low_rank_values import low_rank_values
from llmc.passes.pruning.prune_channels import prune_channels
from llmc.passes.pruning.prune_heads import prune_heads
from llmc.passes.quantization.check_quantizable import check_quantizable
from llmc.passes.quantization.multiply_unrounded import multiply_unrounded
from llmc.passes.quantization.quantize_kv_cache import quantize_kv_cache
from llmc.passes.quantization.quantize_weights import quantize_weights
from llmc.passes.quantization.read_codes import read_codes
from llmc.passes.quantization.scale_channels import scale_channels
from llmc.passes.rewrite import Pass
from llmc.passes.serving.batch_texts import batch_texts
from llmc.passes.serving.cast_kv_cache import cast_kv_cache
from llmc.passes.serving.keep_states import keep_states
from llmc.passes.serving.leave_out_choices import leave_out_choices
from llmc.passes.serving.page_kv_cache import page_kv_cache
from llmc.passes.serving.place_compaction import place_compaction
from llmc.passes.serving.select_logit_rows import select_logit_rows
from llmc.passes.sparsity.read_sparse import read_sparse
from llmc.passes.sparsity.sparsify import sparsify
from llmc.passes.sparsity.store_sparse import store_sparse
from llmc.passes.speculative.attach_draft import attach_draft
from llmc.passes.speculative.insert_medusa_heads import insert_medusa_heads
from llmc.passes.speculative.tap_hidden_states import tap_for_draft


def default() -> tuple[Pass, ...]:
    """Return every pass of a build, in order: llmc's own, and those that installed packages register.

    Raises:
        OptionError: If the passes of a package cannot be loaded.
    """
    return place(built_in(), installed())


def extended(*added: Pass) -> tuple[Pass, ...]:
    """Return the default passes with further ones.

    Args:
        *added: The further passes, each put after the pass that its `after` names, or at the end.

    Returns:
        All passes, in order.

    Raises:
        OptionError: For a name that another pass has, or an `after` that names no pass.
    """
    return place(default(), added)


def built_in() -> tuple[Pass, ...]:
    """llmc's own passes, in order."""
    before = (*canonical(), *speculative(), *quantization(), *parallel(), *serving(), *draft_heads())
    return (*before, *fusion(), *adapters())


def essential() -> frozenset[str]:
    """The names of the passes without which a graph cannot become an engine."""
    return frozenset(pass_.name for pass_ in (*canonical(), *serving()))


def canonical() -> tuple[Pass, ...]:
    """Return the passes from aten, as torch.export returns it, to llmc:: ops over tokens."""
    return (
        remove_export_residue,
        normalize_ops,
        join_parts,
        repeat_last,
        separate_streams,
        unfold_complex,
        positions_input,
        normalize_lookups,
        remove_batch_axis,
        separate_repeats,
        separate_heads,
        fuse_expert_linear,
        normalize_routing,
        fold_constants,
        merge_duplicates,
        fuse_sdpa_attention,
        fuse_eager_attention,
        fuse_layer_norm,
        fuse_layer_norm_without_bias,
        fuse_layer_norm_without_weight,
        fuse_layer_norm_casts,
        fuse_rms_norm,
        fuse_rms_norm_without_weight,
        fuse_rope_angles,
        simplify_repeats,
        fuse_rope,
        fuse_rope_backwards,
        fuse_silu,
        fuse_tanh_gelu,
        fuse_gated_activation,
        fuse_linear,
        fuse_embedding,
        make_lm_head,
        simplify_layout,
        fuse_rope_casts,
        fuse_partial_rope,
        check_canonical,
    )


def speculative() -> tuple[Pass, ...]:
    """The passes of the option `speculative`; none without it."""
    return (tap_for_draft, attach_draft)


def quantization() -> tuple[Pass, ...]:
    """The passes of the options `prune`, `sparsity` and `quantize`. They do not change latent attentions after
    absorb_mla."""
    pruning = (drop_layers, prune_heads, low_rank_values, prune_channels)
    smaller = (read_sparse, scale_channels, sparsify, quantize_weights)
    return (read_codes, check_quantizable, *pruning, absorb_mla, *smaller)


def parallel() -> tuple[Pass, ...]:
    """A part of the weights, of the experts or of the layers for each rank, as the options `tensor_parallel_size`,
    `enable_expert_parallel` and `pipeline_parallel_size` ask; nothing without them."""
    return (separate_products, partition, partition_experts, cut_stages)


def serving() -> tuple[Pass, ...]:
    """Return the passes from one whole sequence to a step of many requests."""
    return (
        calibrate_queries,
        compress_kv_cache,
        leave_out_choices,
        page_kv_cache,
        keep_states,
        cast_kv_cache,
        quantize_kv_cache,
        place_compaction,
        select_logit_rows,
        batch_texts,
    )


def draft_heads() -> tuple[Pass, ...]:
    """The draft heads of the option `speculative`; none without it."""
    return (insert_medusa_heads,)


def fusion() -> tuple[Pass, ...]:
    """Fewer trips to memory. Products that take an epilogue are fused before the rest is merged."""
    return (
        fuse_gated_linear,
        *fuse_linear_activation,
        separate_qkv,
        merge_qkv,
        fuse_linear_residual,
        fuse_add_norm,
        fuse_rope_kv_write,
        store_sparse,
        multiply_unrounded,
    )


def adapters() -> tuple[Pass, ...]:
    """The adapters of the option `enable_lora`; none without it."""
    return (insert_adapters,)
