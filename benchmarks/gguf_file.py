"""Write a GGUF file with random weights of a benchmark shape, for llama.cpp; runs in the peer's environment.

    PEER_PYTHON -m benchmarks.gguf_file llama-3.2-1b.json BF16 /tmp/llama-1b-bf16.gguf

The first argument is the config.json that benchmarks/random_checkpoint.py wrote.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt


def write_gguf(config: dict[str, Any], kind: str, path: Path, seed: int = 0) -> None:
    """Random weights in the named GGML type; norms in F32. The file has no vocabulary: benchmarks use token ids."""
    generator = np.random.default_rng(seed)
    quantization = gguf.GGMLQuantizationType[kind]
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def add_matrix(name: str, rows: int, columns: int) -> None:
        values = (generator.random((rows, columns), dtype=np.float32) - 0.5) * np.float32((12 / columns) ** 0.5)
        writer.add_tensor(name, quantized(values, quantization), raw_dtype=quantization)

    def add_norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, dtype=np.float32))

    add_matrix("token_embd.weight", config["vocab_size"], hidden)
    add_norm("output_norm.weight")
    for layer in range(config["num_hidden_layers"]):
        add_norm(f"blk.{layer}.attn_norm.weight")
        add_matrix(f"blk.{layer}.attn_q.weight", heads * head, hidden)
        add_matrix(f"blk.{layer}.attn_k.weight", kv_heads * head, hidden)
        add_matrix(f"blk.{layer}.attn_v.weight", kv_heads * head, hidden)
        add_matrix(f"blk.{layer}.attn_output.weight", hidden, heads * head)
        add_norm(f"blk.{layer}.ffn_norm.weight")
        add_matrix(f"blk.{layer}.ffn_gate.weight", inner, hidden)
        add_matrix(f"blk.{layer}.ffn_up.weight", inner, hidden)
        add_matrix(f"blk.{layer}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(values: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> npt.NDArray[Any]:
    """The values in a GGML type's block format."""
    result: npt.NDArray[Any] = gguf.quants.quantize(values, kind)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("kind", help="a GGML type: BF16, Q8_0, Q4_0")
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    write_gguf(json.loads(arguments.config.read_text()), arguments.kind, arguments.output)


if __name__ == "__main__":
    main()
