"""bard-6m drafted for by bard-draft: tokens a second by batch size, tokens a step, how often drafts are accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.measure import alternate
from llmc import Engine, SamplingParams, load
from llmc.bench.plot import require_plot_extra
from llmc.compiler import build
from llmc.runtime.engine_stats import SpeculationStats
from llmc.runtime.speculation.gate import Gate

BATCHES = (1, 2, 4, 8, 16, 32)
MODELS = Path("examples/models")
NAMES = [
    "KING",
    "RICHARD",
    "JULIET",
    "ROMEO",
    "HAMLET",
    "BRUTUS",
    "PORTIA",
    "DUKE",
    "QUEEN",
    "NURSE",
    "FIRST",
    "CITIZEN",
    "MESSENGER",
]
OPENINGS = ("My lord,", "What news", "I will not")
TOKENS = 160
WITHOUT, WITH = "without", "with drafts"


class AlwaysOpen(Gate):
    """As many drafts as there is room for."""

    def drafts(self, requests: int, room: int) -> int:
        """Whatever steps take."""
        return max(0, min(self.most, room // requests - 1))


def measure_pair(directory: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Builds both unless they are there."""
    target, draft = (_built(name, directory) for name in ("bard-6m", "bard-draft"))
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    record: dict[str, Any] = {"tokens": TOKENS, "batches": {}}
    with ExitStack() as stack:
        engines = {
            WITHOUT: stack.enter_context(load(target, threads=threads)),
            WITH: stack.enter_context(load(target, threads=threads, speculation=speculation)),
        }
        for temperature in (0.0, 1.0):
            for batch in BATCHES:
                runs: dict[str, Callable[[], float]] = {
                    name: partial(_seconds_a_token, engine, batch, temperature) for name, engine in engines.items()
                }
                samples = alternate(runs, rounds)
                found = {name: list(sample.seconds) for name, sample in samples.items()}
                record["batches"].setdefault(f"{temperature:g}", {})[str(batch)] = found
    return record | {"acceptance": _acceptance(target, draft, threads)}


def pair_tables(record: dict[str, Any]) -> Iterator[Table]:
    """Speeds by temperature, then what came of the drafts."""
    for temperature, batches in record["batches"].items():
        table = Table(title=f"bard-6m with bard-draft, k ≤ 4, T = {temperature}", title_justify="left")
        for column in ("batch", "tok/s without", "tok/s with", "ratio"):
            table.add_column(column, justify="right")
        for batch, found in batches.items():
            without, drafted = (1 / _median(found[name]) for name in (WITHOUT, WITH))
            table.add_row(batch, f"{without:.0f}", f"{drafted:.0f}", f"{drafted / without:.2f}x")
        yield table
    table = Table(title="what came of drafts", title_justify="left", show_header=False)
    for name, value in record["acceptance"].items():
        table.add_row(name, f"{value:.3f}")
    yield table


def plot_pair(record: dict[str, Any], path: Path) -> None:
    """Tokens a second by batch size. Raises OptionError without matplotlib."""
    require_plot_extra()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (temperature, batches) in zip(figure.subplots(1, 2), record["batches"].items(), strict=True):
        for name, color, style in ((WITHOUT, "#0d9488", "--"), (WITH, "#4f46e5", "-")):
            speeds = [1 / _median(found[name]) for found in batches.values()]
            axes.plot([int(batch) for batch in batches], speeds, style, marker="o", color=color, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(BATCHES), labels=[str(batch) for batch in BATCHES])
        axes.set(xlabel="requests", ylabel="tokens a second", title=f"T = {temperature}", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.suptitle("bard-6m, drafted for by bard-draft")
    figure.savefig(path, dpi=120)


def _acceptance(target: Path, draft: Path, threads: int) -> dict[str, float]:
    """Tokens a step of greedy requests with four drafts; accepted drafts where each step has one."""

    def counted(most: int, temperature: float, method: str = "invariant") -> SpeculationStats:
        given = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": most}
        with load(target, threads=threads, speculation={**given, "rejection_sample_method": method}) as engine:
            speculation = engine.loop.speculation
            assert speculation is not None
            speculation._gate = AlwaysOpen(most)
            # As many at a time as have room for all their drafts.
            for begin in range(0, 32, 8):
                group = slice(begin, begin + 8)
                engine.generate(_prompts(32)[group], _params(32, temperature)[group])
            return speculation.stats

    found = {"greedy, k = 4: tokens a step": counted(4, 0.0).tokens_a_step}
    for method in ("invariant", "rejection", "typical"):
        stats = counted(1, 1.0, method)
        found[f"T = 1, {method}: accepted"] = stats.accepted_tokens / stats.draft_tokens
    return found


def _built(name: str, directory: Path) -> Path:
    path = directory / f"{name}.llmc"
    if not path.exists():
        build(MODELS / name, path)
    return path


def _prompts(count: int) -> list[str]:
    both = [f"{name}:\n{words}" for words in OPENINGS for name in NAMES]
    return both[:count]


def _params(count: int, temperature: float) -> list[SamplingParams]:
    seeds = [seed if temperature else None for seed in range(count)]
    return [SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed, ignore_eos=True) for seed in seeds]


def _seconds_a_token(engine: Engine, batch: int, temperature: float) -> float:
    begin = time.perf_counter()
    completions = engine.generate(_prompts(batch), _params(batch, temperature))
    return (time.perf_counter() - begin) / sum(len(each.token_ids) for each in completions)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
