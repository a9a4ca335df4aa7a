"""What benchmarks of a shape against llama.cpp have in common: their options, who takes part, what is measured.

benchmarks/moe.py and benchmarks/states.py say which shape. Measures in turn, each in its own process: prefill of 512
tokens, decode at batch 1 and 16. A share of the read bandwidth compares with the time of just reading as many bytes as
a step at batch 1 has to move: the best of five passes, measured in the same rounds; and then one pass after each of
some steps, since what the memory of a shared machine gives may be twice as much a second later.
"""

from __future__ import annotations

import argparse
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
from rich.table import Table

from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.llama_1b import CONTEXT, PROBE, WORKLOADS, build_engine, build_table, machine, workload_table, write
from benchmarks.measure import Sample, alternate
from llmc.codegen.cpp.probes import read_bandwidth
from llmc.targets import host_target

MAX_MODEL_LEN = 4096  # as many positions as OLMoE has
READING_STEPS = 64
MEASURED = ("prefill 512", "decode, batch 1", "decode, batch 16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of both."""
    parser.add_argument("--layers", type=int, help="fewer than the whole shape has")
    parser.add_argument("--directory", type=Path, default=Path("examples/out"), help="for the files and the engine")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", choices=MEASURED, default=MEASURED, metavar="NAME")
    parser.add_argument("--engine", type=Path, help="a built engine to measure instead of building one")
    parser.add_argument("--earlier", nargs=2, metavar=("TREE", "ENGINE"), help="another commit, its engine")
    parser.add_argument("--llama-cpp-python", required=True, help="a Python with llama-cpp-python and gguf")
    parser.add_argument("--json", type=Path)


def gguf_file(python: str, module: str, config: Path, path: Path) -> Path:
    """llama.cpp's file, which that module writes in llama.cpp's environment unless it is there."""
    if not path.exists():
        subprocess.run([python, "-m", module, str(config), str(path)], check=True)
    return path


def compare(
    module: str,
    arguments: argparse.Namespace,
    config: dict[str, Any],
    *,
    model: Path,
    gguf: Path,
    scheme: str,
    step_bytes: Callable[[Path], int],
) -> None:
    """model: what the engine is built from, in that scheme. step_bytes: of an engine, what one token has to move."""
    console = Console()
    record: dict[str, Any] = {"machine": machine(arguments.threads), "config": config, "workloads": {}}
    engine = arguments.engine or gguf.with_suffix(".llmc")
    if arguments.engine is None:
        record["build"] = build_engine(model, engine, scheme, MAX_MODEL_LEN)
        console.print(build_table(record["build"]))
    record["step_bytes"] = step_bytes(engine)
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
            if workload.streams_weights:
                stepped, read = contestants[0].decode_and_read(CONTEXT, READING_STEPS, record["step_bytes"])
                record["workloads"][f"{workload.name}, reading in between"] = {"llmc": stepped, PROBE: read}
                write(record, arguments.json)
                console.print(reading_table(stepped, read))
    console.print(record["machine"])
    console.print(f"reproduce: {sys.executable} -m {module} {shlex.join(sys.argv[1:])}", highlight=False)


def reading_table(stepped: list[float], read: list[float]) -> Table:
    """Of llmc's steps, in turn with reading as many bytes: what memory gives changes within seconds."""
    table = Table(title="decode, batch 1, and reading as many bytes after each step", title_justify="left")
    for column in ("", "median", "spread", "share of read bandwidth"):
        table.add_column(column, justify="left" if column == "" else "right")
    step, reading = Sample(tuple(stepped)), Sample(tuple(read))
    for name, sample in (("llmc", step), ("reading", reading)):
        share = f"{reading.paired_ratio(sample):.0%}"
        table.add_row(name, f"{sample.median * 1e3:.1f} ms", f"{sample.spread:.0%}", share)
    return table


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
