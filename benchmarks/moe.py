"""llmc against llama.cpp on a mixture of experts with random 4-bit weights, on this CPU.

    python -m benchmarks.moe --llama-cpp-python /path/to/other/venv/bin/python
    python -m benchmarks.moe --layers 4 --directory /tmp/moe --json results.json --llama-cpp-python …

The shape is that of OLMoE: 64 experts in a layer, of which a token goes to 8; 1.3 of 6.9 thousand million weights.
llama.cpp runs a file in Q4_0 (mixture_gguf.py), llmc the engine that it builds from that file: the same codes, and
tokens of int8 in both. Measures in turn, each in its own process: prefill of 512 tokens, decode at batch 1 and 16.
A share of the read bandwidth compares with the time of just reading the bytes that a token's weights are, measured in
the same rounds: all but the embedding, and of the experts those that one token goes to.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.llama_1b import PROBE, WORKLOADS, build_engine, build_table, machine, workload_table, write
from benchmarks.measure import alternate
from llmc.codegen.cpp.probes import read_bandwidth
from llmc.engine_format import read_engine
from llmc.program import Launch
from llmc.program.launch_arguments import Operand
from llmc.targets import host_target

OLMOE: dict[str, Any] = {
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
MEASURED = ("prefill 512", "decode, batch 1", "decode, batch 16")


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    config = OLMOE | {"num_hidden_layers": arguments.layers}
    gguf = gguf_file(arguments.llama_cpp_python, config, arguments.directory)
    record: dict[str, Any] = {"machine": machine(arguments.threads), "config": config, "workloads": {}}
    engine = arguments.engine or gguf.with_suffix(".llmc")
    if arguments.engine is None:
        record["build"] = build_engine(gguf, engine, "w4a8")
        console.print(build_table(record["build"]))
    record["active_bytes"] = active_bytes(engine, config)
    with ExitStack() as stack:
        contestants = [stack.enter_context(each) for each in start_contestants(arguments, gguf, engine)]
        for workload in (w for w in WORKLOADS if w.name in arguments.workloads):
            runs: dict[str, Callable[[], float]] = {c.name: partial(workload.run, c) for c in contestants}
            if workload.streams_weights:
                runs[PROBE] = lambda: record["active_bytes"] / read_bandwidth(host_target(), arguments.threads)
            samples = alternate(runs, arguments.rounds)
            record["workloads"][workload.name] = {n: list(s.seconds) for n, s in samples.items()}
            write(record, arguments.json)
            console.print(workload_table(workload, samples))
    console.print(record["machine"])
    console.print(f"reproduce: {sys.executable} -m benchmarks.moe {shlex.join(sys.argv[1:])}", highlight=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--layers", type=int, default=OLMOE["num_hidden_layers"])
    return parser.parse_args()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of all benchmarks against llama.cpp with a shape of their own."""
    parser.add_argument("--directory", type=Path, default=Path("examples/out"), help="for the file and the engine")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", choices=MEASURED, default=MEASURED, metavar="NAME")
    parser.add_argument("--engine", type=Path, help="a built engine to measure instead of building one")
    parser.add_argument("--earlier", nargs=2, metavar=("TREE", "ENGINE"), help="another commit, its engine")
    parser.add_argument("--llama-cpp-python", required=True, help="a Python with llama-cpp-python and gguf")
    parser.add_argument("--json", type=Path)


def gguf_file(python: str, config: dict[str, Any], directory: Path) -> Path:
    """llama.cpp's file, written in its own environment unless it is there."""
    path = directory / f"olmoe-{config['num_hidden_layers']}-q4_0.gguf"
    if not path.exists():
        described = directory / "olmoe.json"
        described.write_text(json.dumps(config))
        subprocess.run([python, "-m", "benchmarks.mixture_gguf", str(described), str(path)], check=True)
    return path


def start_contestants(arguments: argparse.Namespace, gguf: Path, engine: Path) -> list[ContestantProcess]:
    """llmc first; each loads its model now and then waits."""
    threads = ["--threads", str(arguments.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    ours, theirs = "benchmarks.contestants.llmc_engine", "benchmarks.contestants.llama_cpp"
    contestants = [ContestantProcess("llmc", sys.executable, ours, [str(engine), *threads], environment)]
    if arguments.earlier is not None:
        tree, built = arguments.earlier
        elsewhere = {**environment, "PYTHONSAFEPATH": "1", "PYTHONPATH": tree}
        contestants.append(ContestantProcess("earlier llmc", sys.executable, ours, [built, *threads], elsewhere))
    peer = ContestantProcess("llama.cpp", arguments.llama_cpp_python, theirs, [str(gguf), *threads], environment)
    return [*contestants, peer]


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
