"""Long prompts on this CPU: the Llama-3.2-1B shape in w4a8 by cache format, beside llama.cpp's Q4_0 in one run.

    python -m benchmarks.long_context --llama-cpp-python /path/to/other/venv/bin/python --json results.json
    python -m benchmarks.long_context --contexts 512 8192 --formats auto int8 int4 int4:g32 --rounds 3
    python -m benchmarks.long_context --contexts 8192 --formats auto --kv-compression snapkv:share=25

Random weights. Each round asks every contestant in turn, in a process of its own, for one prompt: the time of its
prefill, then of some decode steps behind it. llama.cpp runs with flash attention and a 16-bit cache. The table says
what is left at a context of the speed at the first one, and llmc's ratio to llama.cpp. Policies of --kv-compression
are built with the first format; a second table compares what they gain with what the bytes of a step predict.
With --decode-only no prompt is read: steps are timed with caches of the right size, whose contents do not matter.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from llmc.engine_format import read_engine
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.launch_cost import launch_costs
from llmc.prediction.step_shape import StepShape
from llmc.program import Program
from llmc.program.compression import parse_compression

SHAPE, SCHEME = "llama-3.2-1b", "w4a8"
PEER = "llama.cpp Q4_0"


@dataclass
class Times:
    """Seconds of a contestant at one context, by round; of prefill, none if only decode steps were measured.
    decode: the median step of a round."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def speeds(self, context: int) -> tuple[float, ...]:
        """Tokens per second of prefill, if there are any, and of decode, medians over the rounds."""
        prefill = (context / median(self.prefill),) if self.prefill else ()
        return *prefill, 1 / median(self.decode)


Results = dict[str, dict[int, Times]]


@dataclass(frozen=True)
class Engine:
    """An engine of ours: its name in the tables, the format of its cache, its policy, and where it lies."""

    name: str
    format: str
    compression: str | None
    path: Path

    def rows(self, context: int) -> int:
        """Return the number of rows in its cache after `context` tokens."""
        return context if self.compression is None else len(parse_compression(self.compression).held(context))


def main() -> None:
    """Build what is missing, measure, print a table after each context."""
    arguments = parse_arguments()
    console = Console()
    results: Results = {}
    engines = engines_of(arguments)
    with ExitStack() as stack:
        contestants = [stack.enter_context(contestant) for contestant in start_contestants(arguments, engines)]
        for context in arguments.contexts:
            if arguments.decode_only:
                rows = {engine.name: engine.rows(context) for engine in engines}
                measure_steps(contestants, context, rows, arguments.rounds, arguments.steps, results)
            else:
                measure(contestants, context, arguments.rounds, arguments.steps, results)
            write(record(arguments, results), arguments.json)
            console.print(table(results, context, arguments.contexts[0]))
            if context != arguments.contexts[0] and not arguments.decode_only:
                program = read_engine(engines[0].path, check_weights=False).program
                most = prefill_share(program, context, arguments.contexts[0])
                console.print(f"operations of a prefill allow at most {most:.2f}x, with integers at twice bf16's rate")
            if arguments.kv_compression:
                console.print(gains_table(engines, results, context))
    console.print(machine(arguments.threads))
    console.print(f"reproduce: {sys.executable} -m benchmarks.long_context {shlex.join(sys.argv[1:])}", highlight=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192, 32768])
    parser.add_argument("--formats", nargs="+", default=["auto", "int8", "int4"], help="of --kv-cache")
    parser.add_argument("--kv-compression", nargs="+", default=[], metavar="POLICY", help="a further engine of each")
    parser.add_argument("--steps", type=int, default=16, help="decode steps behind each prompt")
    parser.add_argument("--decode-only", action="store_true", help="read no prompts, which take most of the time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--directory", type=Path, default=Path("examples/out"), help="for the checkpoint and engines")
    parser.add_argument("--llama-cpp-python", help="the Python of an environment with llama-cpp-python and gguf")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def engines_of(arguments: argparse.Namespace) -> list[Engine]:
    """An engine of each format, then one of each policy in the first format."""
    longest = max(arguments.contexts) + arguments.steps + 16
    kinds = [(format, None) for format in arguments.formats]
    kinds += [(arguments.formats[0], policy) for policy in arguments.kv_compression]
    made = list[Engine]()
    for format, policy in kinds:
        name = format if policy is None else f"{format}, {policy}"
        file = re.sub("[^a-z0-9.]+", "-", f"{SHAPE}-{SCHEME}-{name}-{longest}")
        made.append(Engine(f"llmc {name}", format, policy, arguments.directory / f"{file}.llmc"))
    return made


def start_contestants(arguments: argparse.Namespace, engines: Sequence[Engine]) -> Iterator[ContestantProcess]:
    """Start every engine, then llama.cpp; each loads its model now and then waits. Build engines that are missing."""
    model = write_checkpoint(SHAPE, arguments.directory / SHAPE)
    threads = ["--threads", str(arguments.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    longest = max(arguments.contexts) + arguments.steps + 16
    for engine in engines:
        if not engine.path.exists():
            build_engine(model, engine.path, SCHEME, longest, engine.format, engine.compression)
        module = "benchmarks.contestants.llmc_engine"
        yield ContestantProcess(engine.name, sys.executable, module, [str(engine.path), *threads], environment)
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


def measure_steps(
    contestants: Sequence[ContestantProcess],
    context: int,
    rows: Mapping[str, int],
    rounds: int,
    steps: int,
    results: Results,
) -> None:
    """Add a context's decode steps. rows: of caches that do not have `context` rows, by contestant."""
    for number in range(rounds):
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            times = results.setdefault(contestant.name, {}).setdefault(context, Times())
            times.decode.append(median(contestant.decode_behind(rows.get(contestant.name, context), steps)))


def record(arguments: argparse.Namespace, results: Results) -> dict[str, Any]:
    """Results as plain data."""
    times = {
        name: {str(context): vars(each) for context, each in by_context.items()} for name, by_context in results.items()
    }
    return {"machine": machine(arguments.threads), "scheme": SCHEME, "seconds": times}


def table(results: Results, context: int, shortest: int) -> Table:
    """Speeds at one context, by contestant."""
    made = Table(title=f"{context} tokens of context", title_justify="left")
    made.add_column("")
    peer = results.get(PEER, {}).get(context)
    measured = ("prefill", "decode") if next(iter(results.values()))[context].prefill else ("decode",)
    for name in measured:
        made.add_column(f"{name} tok/s", justify="right")
        made.add_column(f"of that at {shortest}", justify="right")
    if peer is not None:
        made.add_column(f"{', '.join(measured)} beside {PEER}", justify="right")
    for contestant, by_context in results.items():
        speeds, short = by_context[context].speeds(context), by_context[shortest].speeds(shortest)
        row = list[str]()
        for name, speed, of_short in zip(measured, speeds, short, strict=True):
            row += [f"{speed:.{0 if name == 'prefill' else 1}f}", f"{speed / of_short:.2f}x"]
        if peer is not None:
            row.append(
                ", ".join(f"{own / their:.2f}x" for own, their in zip(speeds, peer.speeds(context), strict=True))
            )
        made.add_row(contestant, *row)
    return made


def gains_table(engines: Sequence[Engine], results: Results, context: int) -> Table:
    """What each policy gains in decode steps, and the gain that the bytes of its rows predict."""
    made = Table(title=f"decode steps after {context} tokens, with compression", title_justify="left")
    for column in ("policy", "rows", "gain by bytes", "gain", "share of it"):
        made.add_column(column, justify="left" if column == "policy" else "right")
    whole = engines[0]
    whole_program = read_engine(whole.path, check_weights=False).program
    whole_bytes = step_bytes(whole_program, context)
    for engine in engines:
        if engine.compression is None:
            continue
        rows = engine.rows(context)
        # Both in the program without compression: the other one also has the launches that cut tables.
        predicted = whole_bytes / step_bytes(whole_program, rows)
        gained = median(results[whole.name][context].decode) / median(results[engine.name][context].decode)
        share = (gained - 1) / (predicted - 1)
        made.add_row(engine.compression, f"{rows:,}", f"{predicted:.2f}x", f"{gained:.2f}x", f"{share:.0%}")
    return made


def prefill_share(program: Program, context: int, shortest: int) -> float:
    """Of the speed at the shortest prompt, what a prompt of `context` tokens has if nothing but operations takes time,
    and products of two integers run at twice the rate of all others, as VNNI does beside AVX512-BF16."""

    def seconds(tokens: int) -> float:
        shape = StepShape.prefill(tokens).values()
        costs = launch_costs(program)
        times = (evaluate_expression(cost.flops, shape) / (2 if cost.kind.endswith("·int8") else 1) for cost in costs)
        return sum(times) / tokens

    return seconds(shortest) / seconds(context)


def step_bytes(program: Program, rows: int) -> float:
    """Bytes that a decode step of one request moves if its tables have that many rows."""
    shape = StepShape.decode(1, rows).values()
    running = zip(program.launches, launch_costs(program), strict=True)
    return sum(
        evaluate_expression(cost.bytes_moved, shape) for launch, cost in running if launch.runs(tokens=1, logit_rows=1)
    )


if __name__ == "__main__":
    main()
