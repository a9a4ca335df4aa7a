"""Write a GGUF file of a mixture's shape with random codes, for llama.cpp and llmc; runs in the peer's environment.

    PEER_PYTHON -m benchmarks.mixture_gguf olmoe-1b-7b.json /tmp/olmoe-q4_0.gguf

The first argument is a config.json of OLMoE's, which benchmarks/moe.py writes. Every matrix is Q4_0 but the routers',
which are F32 as llama-quantize leaves them. Codes are drawn, and not rounded from numbers: speed does not depend on
them, and tensors are written one at a time.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

BLOCK, CODE_BYTES = 32, 16
# Of codes from -8 to 7 that are equally likely.
CODE_SPREAD = 4.61
# What else Mamba-2's files have beside vectors (benchmarks/states_gguf.py).
SCANS = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm")


def write_mixture(config: dict[str, Any], path: Path, seed: int = 0) -> None:
    """The file has no vocabulary: benchmarks use token ids."""
    writer = gguf.GGUFWriter(path, "olmoe")
    add_metadata(writer, config)
    write_tensors(writer, tensor_shapes(config), seed)


def write_tensors(writer: gguf.GGUFWriter, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> None:
    """All of the file that follows the metadata."""
    for name, shape in shapes.items():
        is_coded = is_matrix(name, shape)
        stored = (*shape[:-1], shape[-1] // BLOCK * (2 + CODE_BYTES)) if is_coded else shape
        dtype = np.dtype(np.uint8 if is_coded else np.float32)
        kind = gguf.GGMLQuantizationType.Q4_0 if is_coded else None
        writer.add_tensor_info(name, stored, dtype, math.prod(stored) * dtype.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(seed)
    for name, shape in shapes.items():
        made = blocks(shape, generator) if is_matrix(name, shape) else numbers(name, shape, generator)
        writer.write_tensor_data(made)
    writer.close()


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
    writer.add_tokenizer_model("no_vocab")


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """By name, of all tensors, in their order in the file."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_experts"]
    head = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer: dict[str, tuple[int, ...]] = {
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


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is in blocks of codes. Routers, and what belongs to a scan, are numbers."""
    return len(shape) > 1 and not any(part in name for part in ("ffn_gate_inp", *SCANS))


def blocks(shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Of Q4_0: a scale in fp16 before the codes of 32 columns, of the size that keeps activations near one."""
    count = math.prod(shape) // BLOCK
    found = np.empty((count, 2 + CODE_BYTES), np.uint8)
    found[:, :2] = np.frombuffer(np.float16(shape[-1] ** -0.5 / CODE_SPREAD).tobytes(), np.uint8)
    found[:, 2:] = np.frombuffer(generator.bytes(count * CODE_BYTES), np.uint8).reshape(count, CODE_BYTES)
    return found.reshape(*shape[:-1], -1)


def numbers(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.float32]:
    """Ones of a norm, how fast each head forgets, or the rows of a router or a convolution."""
    if "ssm_a" in name:
        return -np.arange(1, 1 + shape[0], dtype=np.float32).reshape(shape)
    if len(shape) == 1 or 1 in shape or "norm" in name:
        return np.ones(shape, np.float32)
    found: npt.NDArray[np.float32] = (generator.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    write_mixture(json.loads(arguments.config.read_text()), arguments.output)


if __name__ == "__main__":
    main()
