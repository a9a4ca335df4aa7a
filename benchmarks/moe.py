"""llmc against llama.cpp on a mixture of experts with random 4-bit weights, on this CPU.

    python -m benchmarks.moe --llama-cpp-python /path/to/other/venv/bin/python
    python -m benchmarks.moe --layers 4 --directory /tmp/moe --json results.json --llama-cpp-python …

The shape is that of OLMoE: 64 experts in a layer, of which a token goes to 8; 1.3 of 6.9 thousand million weights.
llama.cpp runs a file in Q4_0 (mixture_gguf.py), llmc the engine that it builds from that file: the same codes, and
tokens of int8 in both. What a step at batch 1 reads are the weights that one token meets: all but the embedding, and of
the experts those that it goes to.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.against_llama_cpp import add_arguments, compare, gguf_file
from llmc.engine_format import read_engine
from llmc.program import Launch
from llmc.program.launch_arguments import Operand

OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "num_experts": 64,
    "num_experts_per_tok": 8,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    config = OLMOE | ({} if arguments.layers is None else {"num_hidden_layers": arguments.layers})
    described = arguments.directory / f"olmoe-{config['num_hidden_layers']}-q4_0.json"
    described.write_text(json.dumps(config))
    python, path = arguments.llama_cpp_python, described.with_suffix(".gguf")
    gguf = gguf_file(python, "benchmarks.mixture_gguf", described, path)
    read = partial(active_bytes, config=config)
    compare("benchmarks.moe", arguments, config, model=gguf, gguf=gguf, scheme="w4a8", step_bytes=read)


def active_bytes(engine: Path, config: dict[str, Any]) -> int:
    """Of the engine's weights those that a decode step of one token reads."""
    program = read_engine(engine, check_weights=False).program
    read_by: dict[str, list[Launch]] = {}
    for launch in program.launches:
        for operand in launch.arguments.values():
            if isinstance(operand, Operand) and operand.space == "weight":
                read_by.setdefault(operand.name, []).append(launch)

    def share(launches: list[Launch]) -> float:
        if any("experts" in launch.arguments for launch in launches):
            return float(config["num_experts_per_tok"] / config["num_experts"])
        return 0.0 if all("embedding" in launch.family for launch in launches) else 1.0

    return round(sum(slot.nbytes * share(read_by.get(slot.name, [])) for slot in program.weights))


if __name__ == "__main__":
    main()
