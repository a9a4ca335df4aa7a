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
    refused = [each for each in comparison.outcomes if isinstance(each, Refused)]
    if refused:
        table = FittingTable("what does not fit", (Column("division"), Column("why", wraps=True)))
        for each in refused:
            table.add_row(str(each.division), each.reason)
        console.print(table)


def comparison_table(comparison: Comparison, title: str) -> FittingTable:
    """A row for each division that serves the load, the best in bold."""
    columns = (
        *numeric("TP", "PP", "replicas", "tokens/s", ("good requests/s" if comparison.goals else "requests/s", 2)),
        *numeric("TTFT p50", ("p99", 1), "TPOT p50", ("p99", 1)),
        *numeric(("weights per rank", 3), ("KV room", 2), ("used", 4), ("preempted", 4)),
    )
    caption = "times in ms; KV room: tokens per replica at the maximum batch size"
    if not comparison.has_stages and any(each.division.layout.pipeline > 1 for each in comparison.served):
        caption += "; italic rows are hypothetical: engines for this target do not support pipeline stages yet"
    table = FittingTable(title, columns, caption=caption)
    built = max(each.division.layout.pipeline for each in comparison.outcomes) if comparison.has_stages else 1
    for each in comparison.served:
        summary, layout = each.summary, each.division.layout
        rate = summary.goodput if summary.goodput is not None else summary.request_throughput
        table.add_row(
            str(layout.tensor),
            str(layout.pipeline),
            str(each.division.replicas),
            f"{summary.output_throughput:.0f}",
            f"{rate:.2f}",
            *(f"{each.percentile(name, share):.1f}" for name in ("ttft", "tpot") for share in (0.5, 0.99)),
            in_bytes(max(memory.weights for memory in each.memory)),
            str(each.kv_tokens),
            f"{each.kv_used / each.kv_tokens:.0%}",
            str(each.preemptions),
            style="bold" if each is comparison.best else "italic" if layout.pipeline > built else "",
        )
    return table


def print_fleets(console: Console, fleets: Sequence[Fleet | NoFleet], title: str, goals: Mapping[str, float]) -> None:
    """Print a row per target, the smallest fleet first, then the targets that cannot serve the load with the reason."""
    found = by_size([each for each in fleets if isinstance(each, Fleet)])
    if found:
        console.print(fleet_table(found, title, goals))
    missing = [each for each in fleets if isinstance(each, NoFleet)]
    if missing:
        table = FittingTable("what does not do", (Column("target"), *numeric("ranks"), Column("why", wraps=True)))
        for each in missing:
            table.add_row(each.target, str(each.ranks), each.reason)
        console.print(table)


def fleet_table(fleets: Sequence[Fleet], title: str, goals: Mapping[str, float]) -> FittingTable:
    """The table of fleets, in order of size."""
    has_prices = any(each.price is not None for each in fleets)
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
    for each in fleets:
        summary = each.served.summary
        rate = summary.goodput if summary.goodput is not None else summary.request_throughput
        prices = (each.price_an_hour, each.price_of_a_million)
        table.add_row(
            each.target,
            str(each.ranks),
            *(("" if price is None else f"{price:.2f}" for price in prices) if has_prices else ()),
            str(each.served.division),
            f"{summary.output_throughput:.0f}",
            f"{rate:.2f}",
            *(f"{each.served.percentile(name, share):.1f}" for name in ("ttft", "tpot") for share in (0.5, 0.99)),
        )
    return table


def fleets_json(fleets: Sequence[Fleet | NoFleet]) -> dict[str, Any]:
    """Return fleets as plain data, the smallest first."""
    found = by_size([each for each in fleets if isinstance(each, Fleet)])
    return {
        "fleets": [
            {
                "target": each.target,
                "ranks": each.ranks,
                "price_an_hour": each.price_an_hour,
                "price_of_a_million_output_tokens": each.price_of_a_million,
                **_served(each.served),
            }
            for each in found
        ],
        "too_small": [vars(each) for each in fleets if isinstance(each, NoFleet)],
    }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data, with vLLM's names for the latencies."""
    best = comparison.best
    return {
        "goals": dict(comparison.goals),
        "best": None if best is None else _division(best),
        "served": [_served(each) for each in comparison.served],
        "refused": [
            {**_division(each), "reason": each.reason} for each in comparison.outcomes if isinstance(each, Refused)
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
