"""Write a Hugging Face checkpoint with random weights of a real model's shape, for speed measurements.

    python -m benchmarks.random_checkpoint llama-3.2-1b /tmp/llama-1b

Speed does not depend on the values of weights; quality does, and is never measured with these.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
}
SHARD_LAYERS = 4


def write_checkpoint(shape: str, directory: Path, seed: int = 0, device: str = "cpu") -> Path:
    """Write the checkpoint unless it is there; shards of a few layers, so that memory holds one at a time.

    device: where the numbers are drawn; a GPU takes seconds where a CPU takes minutes, and draws others.
    """
    if (directory / "model.safetensors.index.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(seed)
    layers = config["num_hidden_layers"]
    shards = 1 + -(-layers // SHARD_LAYERS)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        tensors = outer_tensors(config, generator) if shard == 0 else {}
        for layer in range((shard - 1) * SHARD_LAYERS, min(shard * SHARD_LAYERS, layers)) if shard else ():
            tensors |= layer_tensors(config, layer, generator)
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def outer_tensors(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The embedding, the final norm, and the output matrix if it is not the embedding."""
    hidden = config["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden, generator),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden, generator)
    return tensors


def layer_tensors(config: dict[str, Any], layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The weights of one Llama or Qwen3 layer, [out, in] in bf16; Qwen3 normalizes queries and keys."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    prefix = f"model.layers.{layer}."
    norms = ("q_norm", "k_norm") if config["model_type"] == "qwen3" else ()
    return {
        **{f"{prefix}self_attn.{norm}.weight": torch.ones(head, dtype=torch.bfloat16) for norm in norms},
        f"{prefix}self_attn.q_proj.weight": matrix(queries, hidden, generator),
        f"{prefix}self_attn.k_proj.weight": matrix(keys, hidden, generator),
        f"{prefix}self_attn.v_proj.weight": matrix(keys, hidden, generator),
        f"{prefix}self_attn.o_proj.weight": matrix(hidden, queries, generator),
        f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden, generator),
        f"{prefix}mlp.up_proj.weight": matrix(inner, hidden, generator),
        f"{prefix}mlp.down_proj.weight": matrix(hidden, inner, generator),
        f"{prefix}input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        f"{prefix}post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }


def matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Uniform values of the size that keeps activations near one."""
    values = torch.rand(rows, columns, generator=generator, dtype=torch.float32, device=generator.device)
    scale: float = (12 / columns) ** 0.5
    return ((values - 0.5) * scale).to(torch.bfloat16).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(write_checkpoint(arguments.shape, arguments.directory))


if __name__ == "__main__":
    main()
