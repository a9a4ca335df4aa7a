"""Sparse engines against dense ones of the same type and llama.cpp, on random weights of the Llama-3.2-1B shape.

    python -m benchmarks.sparse --llama-cpp-python /path/to/other/venv/bin/python --json results.json
    python -m benchmarks.sparse --quantize w8a8 --gguf-type Q8_0 --llama-cpp-python …

Both engines are built (or named), then measured in turn, each in its own process: prefill of 512 tokens and decode at
batch 1 and 16. The output projection is sparse, too: it is a fifth of this model. The sparse engine's bytes are held
against what the build said of its bits. Speed is that of these shapes; random weights say nothing of quality.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.llama_1b import WORKLOADS, gguf_file, machine, write
from benchmarks.measure import Sample, alternate
from benchmarks.random_checkpoint import write_checkpoint
from llmc.compiler import build
from llmc.engine_format import read_engine
from llmc.engine_format.reader import read_sparsity

SPARSE, DENSE, PEER = "sparse", "dense", "llama.cpp"
_WORKLOADS = ("decode, batch 1", "decode, batch 16", "prefill 512")


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    model = write_checkpoint("llama-3.2-1b", arguments.directory / "llama-3.2-1b")
    engines = {kind: engine_of(kind, model, arguments) for kind in (SPARSE, DENSE)}
    record: dict[str, Any] = {"machine": machine(arguments.threads), "sparsity": arguments.sparsity}
    record |= {"quantize": arguments.quantize, "gguf_type": arguments.gguf_type, "bytes": bytes_of(engines[SPARSE])}
    record |= {"dense_bytes": weight_bytes(engines[DENSE]), "workloads": {}}
    console.print(record["bytes"])
    with ExitStack() as stack:
        contestants = [stack.enter_context(c) for c in start(engines, model, arguments)]
        for workload in (w for name in arguments.workloads for w in WORKLOADS if w.name == name):
            runs: dict[str, Callable[[], float]] = {c.name: partial(workload.run, c) for c in contestants}
            samples = alternate(runs, arguments.rounds)
            record["workloads"][workload.name] = {name: list(s.seconds) for name, s in samples.items()}
            write(record, arguments.json)
            console.print(table(workload.name, workload.tokens, samples))
    console.print(record["machine"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("examples/out"), help="for the checkpoint and engines")
    parser.add_argument("--sparsity", default="magnitude:0.5,lm_head=magnitude:0.5")
    parser.add_argument("--quantize", help="the scheme of both engines, as for llmc build")
    parser.add_argument("--workloads", nargs="+", default=_WORKLOADS, choices=_WORKLOADS)
    parser.add_argument("--engines", type=Path, nargs=2, metavar=("SPARSE", "DENSE"), help="built before")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gguf-type", choices=["BF16", "Q8_0", "Q4_0"], default="BF16")
    parser.add_argument("--llama-cpp-python", help="the Python of an environment with llama-cpp-python and gguf")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def engine_of(kind: str, model: Path, arguments: argparse.Namespace) -> Path:
    """The named engine, or one that is built now unless it is there."""
    if arguments.engines is not None:
        named: Path = arguments.engines[kind == DENSE]
        return named
    scheme = arguments.quantize or "bf16"
    path: Path = arguments.directory / f"llama-3.2-1b-{scheme}-{kind}.llmc"
    if not path.exists():
        sparsity = arguments.sparsity if kind == SPARSE else ""
        build(model, path, sparsity=sparsity, quantize=arguments.quantize or "", max_model_len=1024)
    return path


def weight_bytes(engine: Path) -> int:
    """Of an engine's weights."""
    return sum(file.stat().st_size for file in (engine / "weights").iterdir())


def bytes_of(engine: Path) -> dict[str, float]:
    """The bytes of the sparse weights as they are stored, and as the build predicted them from their bits."""
    sparse = read_sparsity(read_engine(engine, check_weights=False, check_machine=False).files)
    slots = read_engine(engine, check_weights=False, check_machine=False).program.weights
    stored = sum(slot.nbytes for slot in slots if slot.layout.is_sparse)
    predicted = sum((each.bits or 0.0) * each.rows * each.columns / 8 for each in sparse)
    return {"stored": stored, "predicted": predicted, "ratio": stored / predicted}


def start(engines: dict[str, Path], model: Path, arguments: argparse.Namespace) -> list[ContestantProcess]:
    """Each loads its model now and then waits."""
    threads = ["--threads", str(arguments.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    begin = partial(ContestantProcess, environment=environment)
    module = "benchmarks.contestants.llmc_engine"
    found = [begin(kind, sys.executable, module, [str(path), *threads]) for kind, path in engines.items()]
    if arguments.llama_cpp_python is not None:
        file = gguf_file(arguments.llama_cpp_python, arguments.gguf_type, model, arguments.directory)
        peer = "benchmarks.contestants.llama_cpp"
        found.append(begin(PEER, arguments.llama_cpp_python, peer, [str(file), *threads]))
    return found


def table(name: str, tokens: int, samples: dict[str, Sample]) -> Table:
    """Tokens a second of each, and how much faster the sparse engine is."""
    found = Table(title=name, title_justify="left")
    for column in ("", "tokens/s", "spread", "sparse is"):
        found.add_column(column)
    for contestant, sample in samples.items():
        ratio = sample.median / samples[SPARSE].median
        found.add_row(contestant, f"{tokens / sample.median:.1f}", f"{sample.spread:.0%}", f"{ratio:.2f}x")
    return found


if __name__ == "__main__":
    main()
