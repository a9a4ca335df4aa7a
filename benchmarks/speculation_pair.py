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
from benchmarks.speculation_acceptance import TOKENS, built, of_draft_model, params, prompts
from llmc import Engine, load
from llmc.bench.plot import require_plot_extra

BATCHES = (1, 2, 4, 8, 16, 32)
WITHOUT, WITH = "without", "with drafts"


def measure_pair(directory: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Builds both unless they are there."""
    target, draft = (built(name, directory) for name in ("bard-6m", "bard-draft"))
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
    return record | {"acceptance": of_draft_model(target, draft, threads)}


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


def _seconds_a_token(engine: Engine, batch: int, temperature: float) -> float:
    begin = time.perf_counter()
    completions = engine.generate(prompts(batch), params(batch, temperature, TOKENS))
    return (time.perf_counter() - begin) / sum(len(each.token_ids) for each in completions)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
