"""bard-6m drafted for by bard-draft: tokens a second by batch size, tokens a step, how often drafts are accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.measure import alternate
from benchmarks.speculating import StepTime
from benchmarks.speculation_acceptance import TOKENS, built, of_draft_model, params, prompts
from llmc import Engine, load
from llmc.bench.plot import require_plot_extra
from llmc.runtime.scheduling.step_plan import StepPlan

BATCHES = (1, 2, 4, 8, 16, 32)
WITHOUT, WITH = "without", "with drafts"


def measure_pair(directory: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Builds both unless they are there."""
    target, draft = (built(name, directory) for name in ("bard-6m", "bard-draft"))
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    record: dict[str, Any] = {"tokens": TOKENS, "batches": {}}
    # One engine for both: of two that are loaded alike, one may be some hundredths faster.
    with load(target, threads=threads, speculation=speculation) as engine:
        for temperature in (0.0, 1.0):
            for batch in BATCHES:
                times: dict[str, list[StepTime]] = {WITHOUT: [], WITH: []}
                runs: dict[str, Callable[[], float]] = {
                    WITHOUT: partial(_without, engine, batch, temperature, times[WITHOUT]),
                    WITH: partial(_seconds_a_token, engine, batch, temperature, times[WITH]),
                }
                samples = alternate(runs, rounds)
                found: dict[str, Any] = {name: list(sample.seconds) for name, sample in samples.items()}
                found["costs"] = _costs(times, batch)
                record["batches"].setdefault(f"{temperature:g}", {})[str(batch)] = found
    return record | {"acceptance": of_draft_model(target, draft, threads)}


def pair_tables(record: dict[str, Any]) -> Iterator[Table]:
    """Speeds by temperature, then what came of the drafts."""
    for temperature, batches in record["batches"].items():
        table = Table(title=f"bard-6m with bard-draft, k ≤ 4, T = {temperature}", title_justify="left")
        for column in ("batch", "tok/s without", "tok/s with", "ratio of runs in turn", "bookkeeping", "trials"):
            table.add_column(column, justify="right")
        for batch, found in batches.items():
            without, drafted = (1 / _median(found[name]) for name in (WITHOUT, WITH))
            ratio = _median([a / b for a, b in zip(found[WITHOUT], found[WITH], strict=True)])
            costs = (f"{cost:.1%}" for cost in found["costs"].values())
            table.add_row(batch, f"{without:.0f}", f"{drafted:.0f}", f"{ratio:.2f}x", *costs)
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


def _costs(times: dict[str, list[StepTime]], batch: int) -> dict[str, float]:
    """What speculation costs, of the time without it, by what a machine whose speed changes does not hide: what steps
    without drafts take more beside the executor, and what those with drafts take longer than others would for their
    tokens, by the other steps of the same runs."""
    plain, other = ([each for each in times[name] if not each.drafts] for name in (WITHOUT, WITH))
    usual = _median([each.wall for each in other])
    beside = [_median([each.wall - each.executor for each in steps]) for steps in (other, plain)]
    lost = sum(each.wall - usual * each.tokens / batch for each in times[WITH] if each.drafts)
    return {"bookkeeping": (beside[0] - beside[1]) / usual, "trials": lost / sum(each.wall for each in times[WITH])}


def _without(engine: Engine, batch: int, temperature: float, times: list[StepTime]) -> float:
    """The same of the engine without speculation, which is there again afterwards and has seen nothing."""
    loop = engine.loop
    speculation, loop.speculation, loop.scheduler._speculation = loop.speculation, None, None
    seconds = _seconds_a_token(engine, batch, temperature, times)
    loop.speculation = loop.scheduler._speculation = speculation
    return seconds


def _seconds_a_token(engine: Engine, batch: int, temperature: float, times: list[StepTime]) -> float:
    """times: gets those of the steps in which all requests decode."""
    loop = engine.loop
    real = loop.step

    def timed() -> StepPlan:
        begin = time.perf_counter()
        plan = real()
        wall = time.perf_counter() - begin
        drafted = [chunk for chunk in plan.chunks if chunk.draft]
        if len(plan.decodes) == batch or len(drafted) == len(plan.chunks) == batch:
            gained = sum(len(chunk.request.tokens) - chunk.start - 1 for chunk in drafted)
            times.append(StepTime(wall, loop.executor_seconds, bool(drafted), gained or batch))
        return plan

    loop.step = timed  # type: ignore[method-assign]
    begin = time.perf_counter()
    completions = engine.generate(prompts(batch), params(batch, temperature, TOKENS))
    seconds = time.perf_counter() - begin
    del loop.step
    return seconds / sum(len(each.token_ids) for each in completions)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
