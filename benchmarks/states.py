"""llmc against llama.cpp on a recurrent model with random 4-bit weights, on this CPU.

    python -m benchmarks.states --llama-cpp-python /path/to/other/venv/bin/python
    python -m benchmarks.states --layers 8 --directory /tmp/states --json results.json --llama-cpp-python …

The shape is that of Mamba-2 1.3B: 48 layers, whose states are 103 MB of fp32 a sequence. llama.cpp runs a file in Q4_0
(states_gguf.py), llmc an engine in `w4a8` with the same groups of 32: codes of 4 bits and tokens of 8 in both. Measures
in turn, each in its own process: prefill of 512 tokens, decode at batch 1 and 16. A share of the bandwidth compares
with the time of just reading as many bytes as a step at batch 1 reads and writes, measured in the same rounds: weights
once, states twice.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import Mamba2Config, Mamba2ForCausalLM

from benchmarks.llama_1b import PROBE, WORKLOADS, build_engine, build_table, machine, workload_table, write
from benchmarks.measure import alternate
from benchmarks.moe import add_arguments, start_contestants
from llmc.codegen.cpp.probes import read_bandwidth
from llmc.engine_format import read_engine
from llmc.targets import host_target

MAMBA2: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_heads": 64,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "vocab_size": 50288,
    "tie_word_embeddings": True,
}
SCHEME = "w4a8:g32,lm_head=w4a8:g32"


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    config = MAMBA2 | {"num_hidden_layers": arguments.layers}
    model = checkpoint(config, arguments.directory / f"mamba2-{arguments.layers}")
    gguf = gguf_file(arguments.llama_cpp_python, model)
    record: dict[str, Any] = {"machine": machine(arguments.threads), "config": config, "workloads": {}}
    engine = arguments.engine or model.with_suffix(".llmc")
    if arguments.engine is None:
        record["build"] = build_engine(model, engine, SCHEME)
        console.print(build_table(record["build"]))
    memory = read_engine(engine, check_weights=False).manifest.memory
    record["step_bytes"] = memory["weights"] + 2 * memory["states_per_sequence"]
    with ExitStack() as stack:
        contestants = [stack.enter_context(each) for each in start_contestants(arguments, gguf, engine)]
        for workload in (w for w in WORKLOADS if w.name in arguments.workloads):
            runs: dict[str, Callable[[], float]] = {c.name: partial(workload.run, c) for c in contestants}
            if workload.streams_weights:
                runs[PROBE] = lambda: record["step_bytes"] / read_bandwidth(host_target(), arguments.threads)
            samples = alternate(runs, arguments.rounds)
            record["workloads"][workload.name] = {n: list(s.seconds) for n, s in samples.items()}
            write(record, arguments.json)
            console.print(workload_table(workload, samples))
    console.print(record["machine"])
    console.print(f"reproduce: {sys.executable} -m benchmarks.states {shlex.join(sys.argv[1:])}", highlight=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--layers", type=int, default=MAMBA2["num_hidden_layers"])
    return parser.parse_args()


def checkpoint(config: dict[str, Any], directory: Path) -> Path:
    """Of transformers' class as it begins, unless it is there."""
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        model = Mamba2ForCausalLM(Mamba2Config(**config)).bfloat16()
        model.save_pretrained(directory)
    return directory


def gguf_file(python: str, model: Path) -> Path:
    """llama.cpp's file, written in its own environment unless it is there."""
    path = model.with_suffix(".gguf")
    if not path.exists():
        subprocess.run([python, "-m", "benchmarks.states_gguf", str(model / "config.json"), str(path)], check=True)
    return path


if __name__ == "__main__":
    main()
