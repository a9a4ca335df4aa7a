"""The summary of a run: throughput, latencies as mean, median and p99, goodput, prefix hits; also as JSON."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.bench.request_record import RequestRecord
from llmc.errors import OptionError

# The order of rows, and what each is.
LATENCIES: Mapping[str, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}


@dataclass(frozen=True)
class Latency:
    """Milliseconds."""

    mean: float
    median: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """The figures of a load test. duration: seconds. throughputs: per second. goodput: requests per second that met
    every goal; None without goals.

    prefix_hit_rate: share of prompt tokens found in the server's prefix cache, None if it does not say.
    """

    completed: int
    failed: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    goodput: float | None
    prefix_hit_rate: float | None
    latencies: Mapping[str, Latency]
    first_error: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain data, with vLLM's names for the latencies (mean_ttft_ms, …)."""
        figures = {name: value for name, value in vars(self).items() if name != "latencies"}
        for name, latency in self.latencies.items():
            figures |= {f"{kind}_{name}_ms": value for kind, value in vars(latency).items()}
        return figures


def summarize(records: Sequence[RequestRecord], duration: float, goals: Mapping[str, float]) -> Summary:
    """Summarize the records of a measured load.

    goals: milliseconds that a good request stays within, by name of LATENCIES. duration: seconds of the whole load.
    """
    done = [r for r in records if r.error is None]
    prompt, output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    cached = [r.cached_tokens for r in done if r.cached_tokens is not None]
    samples = {name: [t for r in done for t in r.seconds(name)] for name in LATENCIES}
    good = sum(_meets(r, goals) for r in done)
    return Summary(
        completed=len(done),
        failed=len(records) - len(done),
        duration=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        request_throughput=len(done) / duration,
        output_throughput=output / duration,
        total_throughput=(prompt + output) / duration,
        goodput=good / duration if goals else None,
        prefix_hit_rate=sum(cached) / prompt if cached and prompt else None,
        latencies={name: latency(values) for name, values in samples.items() if values},
        first_error=next((r.error for r in records if r.error is not None), None),
    )


def latency(seconds: Sequence[float]) -> Latency:
    """Mean, median and 99th percentile in milliseconds."""
    return Latency(
        1e3 * statistics.fmean(seconds), 1e3 * statistics.median(seconds), 1e3 * float(np.quantile(seconds, 0.99))
    )


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """Parse goals such as `ttft:200 tpot:50` to milliseconds by name."""
    goals: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el") or goals[name] <= 0:
            raise OptionError(
                f"the goal {text!r} cannot be read", at="--goodput", fix="give ttft:MS, tpot:MS or e2el:MS (repeatable)"
            )
    return goals


def _meets(record: RequestRecord, goals: Mapping[str, float]) -> bool:
    return all(1e3 * seconds <= goal for name, goal in goals.items() for seconds in record.seconds(name))
