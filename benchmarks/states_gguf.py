"""Write a GGUF file of a Mamba-2's shape with random codes, for llama.cpp; runs in the peer's environment.

    PEER_PYTHON -m benchmarks.states_gguf mamba2/config.json /tmp/mamba2-q4_0.gguf

The first argument is a config.json of transformers'. Every matrix is Q4_0, the convolutions are F32 as llama-quantize
leaves them, and the output matrix is the embedding.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf

from benchmarks.mixture_gguf import write_tensors


def write_states(config: dict[str, Any], path: Path) -> None:
    """The file has no vocabulary: benchmarks use token ids."""
    writer = gguf.GGUFWriter(path, "mamba2")
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
    writer.add_tokenizer_model("no_vocab")
    write_tensors(writer, tensor_shapes(config))


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """By name, of all tensors, in their order in the file."""
    hidden, heads, groups = config["hidden_size"], config["num_heads"], config["n_groups"]
    inner = heads * config["head_dim"]
    convolved = inner + 2 * groups * config["state_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
    }
    of_layer: dict[str, tuple[int, ...]] = {
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    write_states(json.loads(arguments.config.read_text()), arguments.output)


if __name__ == "__main__":
    main()
