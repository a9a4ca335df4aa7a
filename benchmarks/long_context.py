"""Long prompts on this CPU: the Llama-3.2-1B shape in w4a8 by cache format, beside llama.cpp's Q4_0 in one run.

    python -m benchmarks.long_context --llama-cpp-python /path/to/other/venv/bin/python --json results.json
    python -m benchmarks.long_context --contexts 512 8192 --formats auto int8 int4 int4:g32 --rounds 3

Random weights. Each round asks every contestant in turn, in a process of its own, for one prompt: the time of its
prefill, then of some decode steps behind it. llama.cpp runs with flash attention and a 16-bit cache. The table says
what is left at a context of the speed at the first one, and llmc's ratio to llama.cpp.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.llama_1b import build_engine, gguf_file, machine, write
from benchmarks.random_checkpoint import write_checkpoint

SHAPE, SCHEME = "llama-3.2-1b", "w4a8"
PEER = "llama.cpp Q4_0"


@dataclass
class Times:
    """Seconds of a contestant at one context, by round. decode: the median step of a round."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def speeds(self, context: int) -> tuple[float, float]:
        """Tokens per second of prefill and of decode, medians over the rounds."""
        return context / median(self.prefill), 1 / median(self.decode)


Results = dict[str, dict[int, Times]]


def main() -> None:
    """Build what is missing, measure, print a table after each context."""
    arguments = parse_arguments()
    console = Console()
    results: Results = {}
    with ExitStack() as stack:
        contestants = [stack.enter_context(contestant) for contestant in start_contestants(arguments)]
        for context in arguments.contexts:
            measure(contestants, context, arguments.rounds, arguments.steps, results)
            write(record(arguments, results), arguments.json)
            console.print(table(results, context, arguments.contexts[0]))
    console.print(machine(arguments.threads))
    console.print(f"reproduce: {sys.executable} -m benchmarks.long_context {shlex.join(sys.argv[1:])}", highlight=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192, 32768])
    parser.add_argument("--formats", nargs="+", default=["auto", "int8", "int4"], help="of --kv-cache")
    parser.add_argument("--steps", type=int, default=16, help="decode steps behind each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--directory", type=Path, default=Path("examples/out"), help="for the checkpoint and engines")
    parser.add_argument("--llama-cpp-python", help="the Python of an environment with llama-cpp-python and gguf")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def start_contestants(arguments: argparse.Namespace) -> Iterator[ContestantProcess]:
    """Start an engine for each format, then llama.cpp; each loads its model now and then waits."""
    model = write_checkpoint(SHAPE, arguments.directory / SHAPE)
    threads = ["--threads", str(arguments.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    longest = max(arguments.contexts) + arguments.steps + 16
    for format in arguments.formats:
        engine = arguments.directory / f"{SHAPE}-{SCHEME}-{format.replace(':', '-')}-{longest}.llmc"
        if not engine.exists():
            build_engine(model, engine, SCHEME, longest, format)
        module = "benchmarks.contestants.llmc_engine"
        yield ContestantProcess(f"llmc {format}", sys.executable, module, [str(engine), *threads], environment)
    if arguments.llama_cpp_python is not None:
        gguf = gguf_file(arguments.llama_cpp_python, "Q4_0", model, arguments.directory)
        module, options = "benchmarks.contestants.llama_cpp", [str(gguf), *threads, "--flash-attention"]
        yield ContestantProcess(PEER, arguments.llama_cpp_python, module, options, environment)


def measure(contestants: Sequence[ContestantProcess], context: int, rounds: int, steps: int, results: Results) -> None:
    """Add a context's times, one prompt of each contestant a round; another one goes first in each."""
    for number in range(rounds):
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            prefill, decode = contestant.prefill_and_decode(context, steps)
            times = results.setdefault(contestant.name, {}).setdefault(context, Times())
            times.prefill.append(prefill)
            times.decode.append(median(decode))


def record(arguments: argparse.Namespace, results: Results) -> dict[str, Any]:
    """Results as plain data."""
    times = {
        name: {str(context): vars(each) for context, each in by_context.items()} for name, by_context in results.items()
    }
    return {"machine": machine(arguments.threads), "scheme": SCHEME, "seconds": times}


def table(results: Results, context: int, shortest: int) -> Table:
    """Speeds at one context, by contestant."""
    made = Table(title=f"{context} tokens of context", title_justify="left")
    for column in ("", "prefill tok/s", f"of that at {shortest}", "decode tok/s", f"of that at {shortest}"):
        made.add_column(column, justify="left" if column == "" else "right")
    peer = results.get(PEER, {}).get(context)
    if peer is not None:
        made.add_column(f"prefill, decode beside {PEER}", justify="right")
    for name, by_context in results.items():
        prefill, decode = by_context[context].speeds(context)
        short_prefill, short_decode = by_context[shortest].speeds(shortest)
        row = [f"{prefill:.0f}", f"{prefill / short_prefill:.2f}x", f"{decode:.1f}", f"{decode / short_decode:.2f}x"]
        if peer is not None:
            their_prefill, their_decode = peer.speeds(context)
            row.append(f"{prefill / their_prefill:.2f}x, {decode / their_decode:.2f}x")
        made.add_row(name, *row)
    return made


if __name__ == "__main__":
    main()
