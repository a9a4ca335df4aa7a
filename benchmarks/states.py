"""llmc against llama.cpp on a recurrent model with random 4-bit weights, on this CPU.

    python -m benchmarks.states --llama-cpp-python /path/to/other/venv/bin/python
    python -m benchmarks.states --shape delta-net --directory /tmp/states --json results.json --llama-cpp-python …

The shapes are that of Mamba-2 1.3B, whose states are 103 MB of fp32 a sequence, and that of Qwen3.5 0.8B, a gated
delta net with attention in each fourth layer. llama.cpp runs a file in Q4_0 (states_gguf.py), llmc an engine in `w4a8`
with the same groups of 32: codes of 4 bits and tokens of 8 in both. What a step at batch 1 moves are all weights once
and the states twice.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.against_llama_cpp import add_arguments, compare, gguf_file
from llmc.engine_format import read_engine

MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_heads": 64,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "vocab_size": 50288,
    "tie_word_embeddings": True,
}
DELTA_NET: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
}
SHAPES = {"mamba2": MAMBA2, "delta-net": DELTA_NET}
SCHEME = "w4a8:g32,lm_head=w4a8:g32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="mamba2")
    add_arguments(parser)
    arguments = parser.parse_args()
    config = SHAPES[arguments.shape] | ({} if arguments.layers is None else {"num_hidden_layers": arguments.layers})
    model = checkpoint(config, arguments.directory / f"{arguments.shape}-{config['num_hidden_layers']}")
    path = model.with_suffix(".gguf")
    gguf = gguf_file(arguments.llama_cpp_python, "benchmarks.states_gguf", model / "config.json", path)
    compare("benchmarks.states", arguments, config, model=model, gguf=gguf, scheme=SCHEME, step_bytes=step_bytes)


def checkpoint(config: dict[str, Any], directory: Path) -> Path:
    """Of transformers' class as it begins, unless it is there."""
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        made: Any = AutoModelForCausalLM  # Its methods have no types.
        model = made.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        model.save_pretrained(directory)
    return directory


def step_bytes(engine: Path) -> int:
    """All weights once, one sequence's states read and written."""
    memory = read_engine(engine, check_weights=False).manifest.memory
    return int(memory["weights"] + 2 * memory["states_per_sequence"])


if __name__ == "__main__":
    main()
