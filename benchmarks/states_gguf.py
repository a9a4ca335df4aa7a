"""Write a GGUF file of a recurrent model's shape with random codes, for llama.cpp; runs in the peer's environment.

    PEER_PYTHON -m benchmarks.states_gguf mamba2/config.json /tmp/mamba2-q4_0.gguf

The first argument is a config.json of Mamba-2's or Qwen3.5's. The output matrix is the embedding.
"""

from __future__ import annotations

from typing import Any

import gguf

from benchmarks.random_gguf import Family, Shapes, command


def add_mamba2_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Heads are counted as time steps' ranks."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["num_heads"])
    writer.add_ssm_group_count(config["n_groups"])


def mamba2_shapes(config: dict[str, Any]) -> Shapes:
    """Of all tensors, by name."""
    hidden, heads, groups = config["hidden_size"], config["num_heads"], config["n_groups"]
    inner = heads * config["head_dim"]
    convolved = inner + 2 * groups * config["state_size"]
    shapes: Shapes = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
    }
    of_layer: Shapes = {
        "attn_norm.weight": (hidden,),
        "ssm_in.weight": (inner + convolved + heads, hidden),
        "ssm_conv1d.weight": (convolved, config["conv_kernel"]),
        "ssm_conv1d.bias": (convolved,),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads, 1),
        "ssm_d": (heads, 1),
        "ssm_norm.weight": (groups, inner // groups),
        "ssm_out.weight": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def add_qwen35_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Of a delta net the value heads are counted as time steps' ranks, the key heads as groups."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    turned = config["head_dim"] // 4
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(turned)
    writer.add_rope_dimension_sections([turned // 2, 0, 0, 0])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])


def qwen35_shapes(config: dict[str, Any]) -> Shapes:
    """Of all tensors, by name: three layers of a delta net, then one of attention with a gate."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head, kv = config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    queries, heads = config["num_attention_heads"] * head, config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    both: Shapes = {
        "attn_norm.weight": (hidden,),
        "post_attention_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    attention: Shapes = {
        "attn_q.weight": (2 * queries, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, queries),
        "attn_q_norm.weight": (head,),
        "attn_k_norm.weight": (head,),
    }
    delta_net: Shapes = {
        "attn_qkv.weight": (2 * keys + values, hidden),
        "attn_gate.weight": (values, hidden),
        "ssm_conv1d.weight": (2 * keys + values, config["linear_conv_kernel_dim"]),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
        "ssm_beta.weight": (heads, hidden),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_norm.weight": (config["linear_value_head_dim"],),
        "ssm_out.weight": (hidden, values),
    }
    shapes: Shapes = {"token_embd.weight": (config["vocab_size"], hidden), "output_norm.weight": (hidden,)}
    for layer, kind in enumerate(config["layer_types"]):
        of_layer = both | (attention if kind == "full_attention" else delta_net)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


if __name__ == "__main__":
    families = {
        "mamba2": Family("mamba2", add_mamba2_metadata, mamba2_shapes),
        "qwen3_5_text": Family("qwen35", add_qwen35_metadata, qwen35_shapes),
    }
    command(__doc__, families)
