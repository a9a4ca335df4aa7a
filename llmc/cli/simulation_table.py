"""Results of a simulation, as tables and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from llmc.cli.table import Column, FittingTable, numeric
from llmc.cli.units import in_bytes
from llmc.simulation.compare import Comparison
from llmc.simulation.fleets import Fleet, NoFleet, by_size
from llmc.simulation.serve import Refused, Served


def print_comparison(console: Console, comparison: Comparison, title: str) -> None:
    """Print the divisions that serve the load, then the others with the reason."""
    console.print(comparison_table(comparison, title))
    refused = [outcome for outcome in comparison.outcomes if isinstance(outcome, Refused)]
    if refused:
        table = FittingTable("what does not fit", (Column("division"), Column("why", wraps=True)))
        for refusal in refused:
            table.add_row(str(refusal.division), refusal.reason)
        console.print(table)


def comparison_table(comparison: Comparison, title: str) -> FittingTable:
    """A row for each division that serves the load, the best in bold."""
    columns = (
        *numeric("TP", "PP", "replicas", "tokens/s", ("good requests/s" if comparison.goals else "requests/s", 2)),
        *numeric("TTFT p50", ("p99", 1), "TPOT p50", ("p99", 1)),
        *numeric(("weights per rank", 3), ("KV room", 2), ("used", 4), ("preempted", 4)),
    )
    caption = "times in ms; KV room: tokens per replica at the maximum batch size"
    table = FittingTable(title, columns, caption=caption)
    for served in comparison.served:
        summary, layout = served.summary, served.division.layout
        rate = summary.goodput if summary.goodput is not None else summary.request_throughput
        table.add_row(
            str(layout.tensor),
            str(layout.pipeline),
            str(served.division.replicas),
            f"{summary.output_throughput:.0f}",
            f"{rate:.2f}",
            *(f"{served.percentile(name, share):.1f}" for name in ("ttft", "tpot") for share in (0.5, 0.99)),
            in_bytes(max(memory.weights for memory in served.memory)),
            str(served.kv_tokens),
            f"{served.kv_used / served.kv_tokens:.0%}",
            str(served.preemptions),
            style="bold" if served is comparison.best else "",
        )
    return table


def print_fleets(console: Console, fleets: Sequence[Fleet | NoFleet], title: str, goals: Mapping[str, float]) -> None:
    """Print a row per target, the smallest fleet first, then the targets that cannot serve the load with the reason."""
    fitting = by_size([fleet for fleet in fleets if isinstance(fleet, Fleet)])
    if fitting:
        console.print(fleet_table(fitting, title, goals))
    missing = [fleet for fleet in fleets if isinstance(fleet, NoFleet)]
    if missing:
        table = FittingTable("what does not do", (Column("target"), *numeric("ranks"), Column("why", wraps=True)))
        for refusal in missing:
            table.add_row(refusal.target, str(refusal.ranks), refusal.reason)
        console.print(table)


def fleet_table(fleets: Sequence[Fleet], title: str, goals: Mapping[str, float]) -> FittingTable:
    """The table of fleets, in order of size."""
    has_prices = any(candidate.price is not None for candidate in fleets)
    priced = numeric("price an hour", "a million tokens") if has_prices else ()
    columns = (
        Column("target"),
        *numeric("ranks"),
        *priced,
        Column("divided"),
        *numeric("tokens/s", ("good requests/s" if goals else "requests/s", 2)),
        *numeric("TTFT p50", ("p99", 1), "TPOT p50", ("p99", 1)),
    )
    served = "serve the load, nearly all requests within the goals" if goals else "serve the load"
    table = FittingTable(title, columns, caption=f"the fewest ranks of each that {served}; times in ms; predicted")
    for fleet in fleets:
        summary = fleet.served.summary
        rate = summary.goodput if summary.goodput is not None else summary.request_throughput
        prices = (fleet.price_an_hour, fleet.price_of_a_million)
        table.add_row(
            fleet.target,
            str(fleet.ranks),
            *(("" if price is None else f"{price:.2f}" for price in prices) if has_prices else ()),
            str(fleet.served.division),
            f"{summary.output_throughput:.0f}",
            f"{rate:.2f}",
            *(f"{fleet.served.percentile(name, share):.1f}" for name in ("ttft", "tpot") for share in (0.5, 0.99)),
        )
    return table


def fleets_json(fleets: Sequence[Fleet | NoFleet]) -> dict[str, Any]:
    """Return fleets as plain data, the smallest first."""
    fitting = by_size([fleet for fleet in fleets if isinstance(fleet, Fleet)])
    return {
        "fleets": [
            {
                "target": fleet.target,
                "ranks": fleet.ranks,
                "price_an_hour": fleet.price_an_hour,
                "price_of_a_million_output_tokens": fleet.price_of_a_million,
                **_served(fleet.served),
            }
            for fleet in fitting
        ],
        "too_small": [vars(fleet) for fleet in fleets if isinstance(fleet, NoFleet)],
    }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data, with vLLM's names for the latencies."""
    best = comparison.best
    return {
        "goals": dict(comparison.goals),
        "best": None if best is None else _division(best),
        "served": [_served(outcome) for outcome in comparison.served],
        "refused": [
            {**_division(outcome), "reason": outcome.reason}
            for outcome in comparison.outcomes
            if isinstance(outcome, Refused)
        ],
    }


def _division(outcome: Served | Refused) -> dict[str, Any]:
    layout = outcome.division.layout
    return {
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "replicas": outcome.division.replicas,
    }


def _served(served: Served) -> dict[str, Any]:
    return {
        **_division(served),
        **served.summary.to_json(),
        "decode_ms": 1e3 * served.decode,
        "kv_tokens": served.kv_tokens,
        "kv_used_tokens": served.kv_used,
        "preemptions": served.preemptions,
        "memory": [vars(memory) for memory in served.memory],
    }
