"""What the cost model predicts beside what is measured, on the Llama-3.2-1B shape and this CPU.

    python -m benchmarks.cost_model [--engine examples/out/llama-3.2-1b.llmc] [--rounds 7] [--json FILE]

Every round takes steps of each kind, each right after it has measured the machine (bytes read; what each kind of kernel
reaches with how many rows, what packing takes, and how much of transfer and arithmetic hide each other; a parallel
loop; all with made-up operands). Both take the best of several runs, since other processes only ever make a run slower.
On a shared host the bandwidth changes by the minute, so a round's steps are compared with that round's machine, and the
median ratio is what counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.llama_1b import machine
from benchmarks.random_checkpoint import write_checkpoint
from llmc.compiler import build
from llmc.debug.profiler import PreparedStep, Profiler
from llmc.engine_format import EngineDirectory, read_engine
from llmc.report.profile import StepProfile, kernel_class
from llmc.runtime.executors.opening import open_executor
from llmc.runtime.executors.opening_request import CacheRoom
from llmc.runtime.threads import thread_count

ALLOWED = 0.25


@dataclass(frozen=True)
class Workload:
    """A kind of step, measured `repeats` times a round. within: whether its prediction is held to ALLOWED."""

    name: str
    within: bool
    repeats: int
    prepare: Callable[[Profiler], PreparedStep]


WORKLOADS = (
    Workload("decode, batch 1, context 128", True, 7, lambda p: p.decode(1, 128)),
    Workload("decode, batch 1, context 1024", True, 7, lambda p: p.decode(1, 1024)),
    Workload("decode, batch 16, context 128", True, 5, lambda p: p.decode(16, 128)),
    Workload("prefill 256", False, 1, lambda p: p.prefill(256)),
)


def main() -> None:
    arguments = parse_arguments()
    console, threads = Console(), thread_count(arguments.threads)
    directory = open_engine(arguments.engine)
    rounds: dict[str, list[StepProfile]] = {workload.name: [] for workload in WORKLOADS}
    executor, blocks = open_executor(directory, CacheRoom(), threads)
    try:
        profiler = Profiler(directory, executor, blocks, threads, typical=min)
        prepared = {workload: workload.prepare(profiler) for workload in WORKLOADS}
        for _ in range(arguments.rounds):
            for workload in WORKLOADS:
                rounds[workload.name].append(profiler.measure(prepared[workload], workload.repeats))
    finally:
        executor.close()
    for workload in WORKLOADS:
        console.print(class_table(workload, rounds[workload.name], directory))
    console.print(summary_table(rounds))
    console.print(machine(threads), highlight=False)
    console.print(f"reproduce: {sys.executable} -m benchmarks.cost_model --engine {arguments.engine}", highlight=False)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record(rounds, machine(threads)), indent=1) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=Path("examples/out/llama-3.2-1b.llmc"), help="built if missing")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def open_engine(path: Path) -> EngineDirectory:
    if not path.exists():
        build(write_checkpoint("llama-3.2-1b", path.parent / "llama-3.2-1b"), path, max_model_len=8192)
    return read_engine(path, check_weights=False)


def ratios(rounds: list[StepProfile]) -> list[float]:
    """Measured over predicted time of a step, round by round."""
    return [step.seconds / step.predicted for step in rounds]


def class_table(workload: Workload, rounds: list[StepProfile], directory: EngineDirectory) -> Table:
    """Medians over the rounds, by kernel and shape."""
    launches = directory.program.launches
    measured: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(rounds))
    predicted: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(rounds))
    for number, step in enumerate(rounds):
        for each in step.launches:
            name = kernel_class(launches[each.launch])
            measured[name][number] += each.seconds
            predicted[name][number] += each.predicted
    table = Table(title=workload.name, title_justify="left")
    table.add_column("kernels", overflow="fold")
    for column in ("measured", "predicted", "ratio", "spread"):
        table.add_column(column, justify="right", no_wrap=True)

    def add(name: str, ours: list[float], model: list[float], each: list[float]) -> None:
        spread = (max(each) - min(each)) / statistics.median(each)
        milliseconds = (f"{statistics.median(values) * 1e3:.3f} ms" for values in (ours, model))
        table.add_row(name, *milliseconds, f"{statistics.median(each):.2f}", f"{spread:.0%}")

    for name in sorted(measured, key=lambda name: -statistics.median(measured[name])):
        quotients = [a / b for a, b in zip(measured[name], predicted[name], strict=True)]
        add(name, measured[name], predicted[name], quotients)
    table.add_section()
    add("the whole step", [s.seconds for s in rounds], [s.predicted for s in rounds], ratios(rounds))
    return table


def summary_table(rounds: dict[str, list[StepProfile]]) -> Table:
    """How far the prediction is off, and the machine that it was made from."""
    table = Table(title="prediction of whole steps", title_justify="left")
    table.add_column("step", overflow="fold")
    for column in ("off by", "rounds", "goal", "GB/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for workload in WORKLOADS:
        steps = rounds[workload.name]
        each = [1 / ratio - 1 for ratio in ratios(steps)]
        off = statistics.median(each)
        verdict = ("[green]met[/]" if abs(off) <= ALLOWED else "[red]missed[/]") if workload.within else ""
        rates = [step.rates for step in steps]
        table.add_row(
            workload.name,
            f"{off:+.0%}",
            f"{min(each):+.0%} … {max(each):+.0%}",
            verdict and f"{ALLOWED:.0%}: {verdict}",
            f"{statistics.median(r.bandwidth for r in rates) / 1e9:.1f}",
        )
    return table


def record(rounds: dict[str, list[StepProfile]], where: str) -> dict[str, Any]:
    """Plain data of every round's steps."""
    return {
        "machine": where,
        "steps": {
            name: [{"seconds": s.seconds, "predicted": s.predicted, "bandwidth": s.rates.bandwidth} for s in steps]
            for name, steps in rounds.items()
        },
    }


if __name__ == "__main__":
    main()
