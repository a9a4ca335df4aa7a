"""`llmc bench`: serve (load on a server), throughput and latency (an engine without a server), startup."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from llmc.cli.bench_table import summary_table
from llmc.cli.draft_rows import draft_figures, draft_rows, drafts_of
from llmc.cli.help_text import GroupHelp, VerbHelp
from llmc.cli.missing_package import require_extra
from llmc.cli.opening_options import SpeculativeConfig
from llmc.cli.option_group import expand_groups
from llmc.cli.output_file import check_output, write_figures
from llmc.cli.shape_options import ShapeOptions
from llmc.cli.status_line import status_line
from llmc.cli.table import Column, FittingTable, facts, numeric, standard_output
from llmc.cli.told_progress import told
from llmc.errors import LlmcError, OptionError
from llmc.plural import counted
from llmc.settings import settings

if TYPE_CHECKING:
    from llmc.bench.prompts import PromptShape
    from llmc.bench.request_record import RequestRecord

bench = typer.Typer(name="bench", cls=GroupHelp, help="Measure a server or an engine.", no_args_is_help=True)

Seed = Annotated[int, typer.Option(help="seed of prompts and arrivals")]
Json = Annotated[Path | None, typer.Option("--json", help="file for the figures, as JSON")]
Threads = Annotated[int | None, typer.Option(help="threads per step; default: all cores")]


@bench.command("serve", cls=VerbHelp)
@expand_groups
def bench_serve(
    *,
    base_url: Annotated[str, typer.Option(help="URL of the server")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="model name; default: the server's first model")] = None,
    num_prompts: Annotated[int, typer.Option(help="total number of requests", min=1)] = 100,
    request_rate: Annotated[
        float | None, typer.Option(help="average requests per second; default: all at once")
    ] = None,
    burstiness: Annotated[float, typer.Option(help="1 is a Poisson process; smaller values are burstier")] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="concurrent clients, each with one request in flight")
    ] = None,
    shape: ShapeOptions,
    vocab_size: Annotated[int, typer.Option(help="upper limit of the prompts' token ids", min=2)] = 1000,
    goodput: Annotated[list[str] | None, typer.Option(help="a goal such as ttft:200, in ms (repeatable)")] = None,
    warmup: Annotated[int, typer.Option(help="requests before the measurement", min=0)] = 1,
    api_key: Annotated[str | None, typer.Option(help="API key; default: LLMC_API_KEY")] = None,
    seed: Seed = 0,
    json_file: Json = None,
    plot: Annotated[Path | None, typer.Option(help="file for a plot (.png, .svg)")] = None,
) -> None:
    """Send requests to an OpenAI-compatible server and measure what its clients see."""
    from llmc.bench.client import fetch_counts, find_server
    from llmc.bench.load import Arrival, run_load
    from llmc.bench.plot import plot_run, require_plot_extra
    from llmc.bench.prompts import make_requests
    from llmc.bench.summary import parse_goals, summarize

    arrival = Arrival(concurrency=max_concurrency, rate=request_rate, burstiness=burstiness, seed=seed)
    goals = parse_goals(goodput or [])
    check_output(json_file, plot)
    if plot is not None:
        require_plot_extra()
    server, max_model_len = asyncio.run(find_server(base_url, model, api_key or settings().api_key))
    if max_model_len is not None:
        _check_fits(shape, max_model_len, "model", at="--input-len, --output-len, --prefix-len")
    requests = make_requests(shape, num_prompts, vocab_size, seed)
    if warmup:
        others = make_requests(shape, warmup, vocab_size, seed + 1)  # The measured ones must not be in a cache.
        asyncio.run(run_load(server, others, Arrival(concurrency=1)))
    before = asyncio.run(fetch_counts(server))
    with _progress("requests", num_prompts) as advance:
        records, duration = asyncio.run(run_load(server, requests, arrival, lambda record: advance()))
    drafts, summary = asyncio.run(fetch_counts(server, before)), summarize(records, duration, goals)
    title = f"{server.model} at {server.base_url}: {_load_in_words(max_concurrency, request_rate)}"
    standard_output().print(summary_table(summary, title, drafts))
    given = {"arrival": vars(arrival), "shape": vars(shape), "num_prompts": num_prompts, "seed": seed}
    first = min(record.sent for record in records)
    # `llmc simulate --trace` also reads them.
    requests_json = {"requests": [{"arrival": r.sent - first, **_record_json(r)} for r in records]}
    write_figures(json_file, summary.to_json() | given | draft_figures(drafts) | requests_json)
    if plot is not None:
        plot_run(records, plot, title)
    if summary.failed:
        raise LlmcError(
            f"{summary.failed} of {counted(num_prompts, 'request')} failed: {summary.first_error}", at=server.base_url
        )


@bench.command("throughput", cls=VerbHelp)
@expand_groups
def bench_throughput(
    engine: Annotated[Path, typer.Argument(help="engine directory")],
    *,
    num_prompts: Annotated[int, typer.Option(help="total number of requests", min=1)] = 64,
    shape: ShapeOptions,
    threads: Threads = None,
    speculative_config: SpeculativeConfig = None,
    seed: Seed = 0,
    json_file: Json = None,
) -> None:
    """Generate for all prompts at once, without a server: the maximum throughput of the engine."""
    from llmc.bench.prompts import make_requests
    from llmc.runtime.loading import load
    from llmc.runtime.sampling.sampling_params import SamplingParams

    check_output(json_file)
    with load(engine, threads=threads, speculation=speculative_config) as opened:
        _check_fits(shape, opened.limits.max_model_len)
        requests = make_requests(shape, num_prompts, opened.info.vocab_size, seed)
        params = [SamplingParams(max_tokens=request.output_len, ignore_eos=True) for request in requests]
        with status_line(f"generating for {counted(num_prompts, 'prompt')}"):
            start = time.perf_counter()
            completions = opened.generate([request.prompt for request in requests], params)
            seconds = time.perf_counter() - start
        drafts = drafts_of(opened)
    output = sum(len(completion.token_ids) for completion in completions)
    prompt = sum(len(request.prompt) for request in requests)
    figures = {
        "seconds": seconds,
        "requests_per_second": num_prompts / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (prompt + output) / seconds,
    }
    table = facts(f"{engine.name}: {counted(num_prompts, 'prompt')} at once", right=True)
    table.add_row("time", f"{seconds:.2f} s")
    table.add_row("requests", f"{num_prompts / seconds:.2f}/s")
    table.add_row("output tokens", f"{output / seconds:.1f}/s")
    table.add_row("all tokens", f"{(prompt + output) / seconds:.1f}/s")
    for row in draft_rows(drafts):
        table.add_row(*row)
    standard_output().print(table)
    settings_json = {"shape": vars(shape), "num_prompts": num_prompts, "seed": seed}
    write_figures(json_file, {**figures, **draft_figures(drafts), **settings_json})


@bench.command("latency", cls=VerbHelp)
def bench_latency(
    engine: Annotated[Path, typer.Argument(help="engine directory")],
    batch_size: Annotated[int, typer.Option(help="prompts per batch", min=1)] = 1,
    input_len: Annotated[int, typer.Option(help="tokens per prompt")] = 32,
    output_len: Annotated[int, typer.Option(help="tokens to generate per prompt")] = 128,
    iterations: Annotated[int, typer.Option(help="number of measured batches", min=1)] = 10,
    warmup: Annotated[int, typer.Option(help="batches before the measurement", min=0)] = 2,
    threads: Threads = None,
    speculative_config: SpeculativeConfig = None,
    seed: Seed = 0,
    json_file: Json = None,
) -> None:
    """Time whole batches, one at a time, without a server."""
    import numpy as np

    from llmc.bench.prompts import PromptShape, make_requests
    from llmc.bench.summary import latency
    from llmc.runtime.loading import load
    from llmc.runtime.sampling.sampling_params import SamplingParams

    shape = PromptShape(input_len=input_len, output_len=output_len)
    check_output(json_file)
    seconds: list[float] = []
    with (
        load(engine, threads=threads, speculation=speculative_config) as opened,
        _progress("batches", warmup + iterations) as advance,
    ):
        _check_fits(shape, opened.limits.max_model_len)
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        for iteration in range(warmup + iterations):
            # Prompts that were not seen before: a prefix cache must not help.
            requests = make_requests(shape, batch_size, opened.info.vocab_size, seed + iteration)
            start = time.perf_counter()
            opened.generate([request.prompt for request in requests], params)
            if iteration >= warmup:
                seconds.append(time.perf_counter() - start)
            advance()
        drafts = drafts_of(opened)
    measured = latency(seconds)
    table = facts(f"{engine.name}: batches of {batch_size}", right=True)
    table.add_row("mean", f"{measured.mean:.1f} ms")
    for share in (0.1, 0.5, 0.9, 0.99):
        table.add_row(f"p{share * 100:g}", f"{1e3 * np.quantile(seconds, share):.1f} ms")
    table.add_row("a token", f"{measured.mean / output_len:.2f} ms")
    for row in draft_rows(drafts):
        table.add_row(*row)
    standard_output().print(table)
    figures = {**vars(measured), **draft_figures(drafts), "seconds": seconds}
    write_figures(json_file, {**figures, "shape": vars(shape), "batch_size": batch_size})


@bench.command("startup", cls=VerbHelp)
def bench_startup(
    engine: Annotated[Path, typer.Argument(help="engine directory")],
    iterations: Annotated[int, typer.Option(help="number of new processes", min=1)] = 5,
    json_file: Json = None,
) -> None:
    """Time from a new process to the first token, and to the first answer of a server."""
    from llmc.bench.startup import first_token_seconds, server_seconds
    from llmc.bench.summary import latency

    check_output(json_file)
    require_extra("serve", "llmc bench startup")
    measured: dict[str, list[float]] = {"process to first token": [], "process to first answer of a server": []}
    with _progress("starts", 2 * iterations) as advance:
        for _ in range(iterations):
            measured["process to first token"].append(first_token_seconds(engine))
            advance()
            measured["process to first answer of a server"].append(server_seconds(engine))
            advance()
    table = FittingTable(f"{engine.name}: start", (Column("", wraps=True), *numeric("median", "worst")))
    for name, seconds in measured.items():
        table.add_row(name, f"{latency(seconds).median / 1e3:.2f} s", f"{max(seconds):.2f} s")
    standard_output().print(table)
    write_figures(json_file, measured)


def _load_in_words(users: int | None, rate: float | None) -> str:
    return f"{f'{users} users' if users else 'no limit on users'}, {f'{rate:g} requests/s' if rate else 'sent at once'}"


def _check_fits(
    shape: PromptShape, max_model_len: int, whose: str = "engine", at: str = "--input-len, --output-len"
) -> None:
    if shape.longest > max_model_len:
        raise OptionError(
            f"prompts and outputs of up to {shape.longest} tokens do not fit the {whose}'s {max_model_len}",
            at=at,
            fix="make them shorter",
        )


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error; entering gives a function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    with told(bars):
        task = bars.add_task(name, total=total)
        yield lambda: bars.advance(task)


def _record_json(record: RequestRecord) -> dict[str, Any]:
    return {
        "ttft": record.first_token,
        "tpot": record.per_token,
        "e2el": record.total,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "error": record.error,
    }
