"""The table that `llmc bench serve` ends with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from llmc.cli.draft_rows import draft_rows
from llmc.cli.table import Column, FittingTable, numeric

if TYPE_CHECKING:
    from llmc.bench.draft_counts import DraftCounts
    from llmc.bench.summary import Summary


def summary_table(summary: Summary, title: str, drafts: DraftCounts | None = None) -> FittingTable:
    """Latencies, then throughput, then the acceptance of the server's drafts, if it has any."""
    table = FittingTable(title, (Column("", wraps=True), *numeric(("mean", 1), "median", "p99")))
    from llmc.bench.summary import LATENCIES

    for name, text in LATENCIES.items():
        latency = summary.latencies.get(name)
        if latency is not None:
            table.add_row(f"{text} ({name.upper()})", *(f"{ms:.2f} ms" for ms in vars(latency).values()))
    table.add_section()
    requests = f"{summary.completed} in {summary.duration:.1f} s"
    table.add_row("requests", requests, f"{summary.request_throughput:.2f}/s", _failed(summary))
    table.add_row("output tokens", f"{summary.output_tokens}", f"{summary.output_throughput:.1f}/s", "")
    table.add_row(
        "all tokens", f"{summary.prompt_tokens + summary.output_tokens}", f"{summary.total_throughput:.1f}/s", ""
    )
    if summary.goodput is not None:
        table.add_row("within the goals", "", f"{summary.goodput:.2f}/s", "")
    if summary.prefix_hit_rate is not None:
        table.add_row("prompt tokens from the prefix cache", "", f"{summary.prefix_hit_rate:.1%}", "")
    for name, text in draft_rows(drafts):
        table.add_row(name, "", text, "")
    return table


def _failed(summary: Summary) -> Text:
    return Text(f"{summary.failed} failed" if summary.failed else "", style="red")
