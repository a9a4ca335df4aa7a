"""What speculation brings on this CPU: the Llama-3.2-1B shape with a drafter of known acceptance, and the shipped pair.

    python -m benchmarks.speculation --engine llama-1b-w4a8.llmc --llama-cpp-python PYTHON --json results.json
    python -m benchmarks.speculation --pair --json results.json --plot docs/speculation.png

The first runs random weights, whose answers nobody can draft: the drafter knows them, and spoils each token with a
probability that is given. The engine runs without speculation, with drafts of which 0.7 come true, with random ones,
and with speculation that never drafts, in turn; and llama.cpp, if its environment is given, with as many drafts that
come true as often, which take it no time. The second runs bard-6m with bard-draft for real, at several batch sizes,
greedy and drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.llama_1b import gguf_file, machine
from benchmarks.measure import Sample, alternate
from benchmarks.random_checkpoint import write_checkpoint
from benchmarks.speculating import ACCEPTANCE, CONTEXT, DRAFTS, Speculating
from benchmarks.speculation_pair import measure_pair, pair_tables, plot_pair
from llmc.runtime.threads import thread_count

PLAIN = "without speculation"
PEER, PEER_KNOWING = "llama.cpp", f"llama.cpp, {ACCEPTANCE:.0%} of drafts right"
KNOWING, RANDOM, CLOSED = f"{ACCEPTANCE:.0%} of drafts right", "random drafts", "never drafts"
# Of the time without speculation, by batch size, what each has to stay below.
GOALS: Mapping[int, Mapping[str, float]] = {
    1: {KNOWING: 1 / 1.5},
    16: {KNOWING: 1 / 0.98},
    32: {KNOWING: 1 / 0.98},
}


# More than that time, by what shows it whatever the machine's speed is in a run.
COSTS: Mapping[str, float] = {RANDOM: 0.03, CLOSED: 0.01}


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    record: dict[str, Any] = {"machine": machine(arguments.threads), "note": arguments.note}
    if arguments.pair:
        record |= measure_pair(arguments.directory, arguments.rounds, arguments.threads)
        for table in pair_tables(record):
            console.print(table)
        if arguments.plot is not None:
            plot_pair(record, arguments.plot)
    else:
        measure_shape(arguments, record, console)
    console.print(record["machine"], arguments.note or "", highlight=False)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="store_true", help="measure the shipped pair instead")
    parser.add_argument("--engine", type=Path, help="of the 1B shape; default: one in w4a8 is built")
    parser.add_argument("--directory", type=Path, default=Path("examples/out"), help="for what is built")
    parser.add_argument("--llama-cpp-python", help="the Python of an environment with llama-cpp-python and gguf")
    parser.add_argument("--gguf-type", choices=["BF16", "Q8_0", "Q4_0"], default="Q4_0", help="of llama.cpp's weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument(
        "--runs", nargs="+", choices=[KNOWING, RANDOM, CLOSED], help="these, and the one without, alone"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=thread_count(None))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="of the pair, a picture (.png, .svg)")
    parser.add_argument("--note", default="", help="what the machine was doing beside, for the record")
    return parser.parse_args()


def measure_shape(arguments: argparse.Namespace, record: dict[str, Any], console: Console) -> None:
    """Every batch size, and what came of it, put into the record."""
    record |= {"acceptance": ACCEPTANCE, "drafts": DRAFTS, "batches": {}}
    engine = arguments.engine or build_shape(arguments.directory)
    with ExitStack() as stack:
        peer = start_llama_cpp(arguments, stack)
        speculating = stack.enter_context(Speculating(engine, arguments.threads))
        for batch in arguments.batches:
            prepared = speculating.prepared(batch)
            runs: dict[str, Callable[[], float]] = {
                PLAIN: prepared.plain,
                KNOWING: partial(prepared.drafting, ACCEPTANCE),
                RANDOM: partial(prepared.drafting, 0.0),
                CLOSED: prepared.closed,
            }
            if batch > 1:
                runs = {name: runs[name] for name in (PLAIN, KNOWING)}
            elif peer is not None:
                runs[PEER] = partial(peer.decode, 1, CONTEXT, prepared.steps)
                runs[PEER_KNOWING] = partial(peer.speculate, CONTEXT, prepared.steps, DRAFTS, ACCEPTANCE)
            if arguments.runs is not None:
                runs = {name: run for name, run in runs.items() if name in (PLAIN, *arguments.runs)}
            samples = alternate(runs, arguments.rounds)
            found: dict[str, Any] = {
                "seconds_a_token": {name: list(sample.seconds) for name, sample in samples.items()},
                "paired_ratios": {name: sample.paired_ratio(samples[PLAIN]) for name, sample in samples.items()},
            }
            record["batches"][str(batch)] = found | prepared.figures() | {"costs": prepared.costs()}
            console.print(shape_table(batch, samples))
            for name, cost in prepared.costs().items():
                reached = "ok" if cost <= COSTS[name] else "MISSED"
                pairs = found["paired_ratios"][name] - 1
                console.print(
                    f"{name} cost {cost:.2%} of the time within runs, at most {COSTS[name]:.0%}: {reached}; "
                    f"{pairs:+.2%} in the median of pairs of runs"
                )
            console.print(prepared.figures(), highlight=False)


def start_llama_cpp(arguments: argparse.Namespace, stack: ExitStack) -> ContestantProcess | None:
    """The peer over the same shape, stopped between its turns; None where its environment is not given."""
    if arguments.llama_cpp_python is None:
        return None
    model = write_checkpoint("llama-3.2-1b", arguments.directory / "llama-3.2-1b")
    gguf = gguf_file(arguments.llama_cpp_python, arguments.gguf_type, model, arguments.directory)
    options = [str(gguf), "--threads", str(arguments.threads)]
    module, environment = "benchmarks.contestants.llama_cpp", dict(os.environ)
    peer = ContestantProcess("llama.cpp", arguments.llama_cpp_python, module, options, environment)
    return stack.enter_context(peer)


def shape_table(batch: int, samples: Mapping[str, Sample]) -> Table:
    """Tokens a second of all requests together, the ratio, and whether it is what it has to be."""
    table = Table(title=f"batch {batch}", title_justify="left")
    for column in ("", "tok/s", "spread", "of the speed without", "goal"):
        table.add_column(column, justify="left" if column == "" else "right")
    plain = samples[PLAIN].median
    for name, sample in samples.items():
        goal = GOALS.get(batch, {}).get(name)
        reached = "" if goal is None else f"{1 / goal:.2f}x {'ok' if sample.median <= plain * goal else 'MISSED'}"
        table.add_row(
            name, f"{1 / sample.median:.1f}", f"{sample.spread:.0%}", f"{plain / sample.median:.2f}x", reached
        )
    return table


def build_shape(directory: Path) -> Path:
    """The 1B shape in w4a8, unless it is there."""
    path = directory / "llama-3.2-1b-w4a8-lm_head-w4a8.llmc"
    if not path.exists():
        model = write_checkpoint("llama-3.2-1b", directory / "llama-3.2-1b")
        command = [sys.executable, "-m", "llmc", "build", str(model), "-o", str(path), "--max-model-len", "8192"]
        subprocess.run([*command, "--quantize", "w4a8,lm_head=w4a8"], check=True, stdout=subprocess.DEVNULL)
    return path


if __name__ == "__main__":
    main()
