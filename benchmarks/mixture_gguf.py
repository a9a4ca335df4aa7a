"""Write a GGUF file of a mixture's shape with random codes, for llama.cpp and llmc; runs in the peer's environment.

    PEER_PYTHON -m benchmarks.mixture_gguf olmoe-1b-7b.json /tmp/olmoe-q4_0.gguf

The first argument is a config.json of OLMoE's, which benchmarks/moe.py writes.
"""

from __future__ import annotations

from typing import Any

import gguf

from benchmarks.random_gguf import Family, Shapes, command


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What llama.cpp asks of an OLMoE."""
    head = config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head)
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """Of all tensors, by name."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_experts"]
    head = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * head
    shapes: Shapes = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer: Shapes = {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_q_norm": (hidden,),
            "attn_k": (keys, hidden),
            "attn_k_norm": (keys,),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate_inp": (experts, hidden),
            "ffn_gate_exps": (experts, inner, hidden),
            "ffn_up_exps": (experts, inner, hidden),
            "ffn_down_exps": (experts, hidden, inner),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


if __name__ == "__main__":
    command(__doc__, {"olmoe": Family("olmoe", add_metadata, tensor_shapes)})
