"""Acceptance of drafts, at the end of the output of `llmc bench` and `llmc run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.bench.draft_counts import DraftCounts
    from llmc.runtime.engine import Engine


def drafts_of(engine: Engine) -> DraftCounts | None:
    """Return the counts of drafts; None for an engine that does not draft."""
    from llmc.bench.draft_counts import DraftCounts

    speculation = engine.loop.speculation
    if speculation is None:
        return None
    stats = speculation.stats
    return DraftCounts(stats.drafts, stats.draft_tokens, stats.accepted_tokens)


def draft_rows(counts: DraftCounts | None) -> list[tuple[str, str]]:
    """Rows of a table; none for an engine that does not draft."""
    if counts is None:
        return []
    accepted = f"{counts.acceptance:.0%} of {counts.draft_tokens}" if counts.draft_tokens else "none were made"
    return [("drafts accepted", accepted), ("tokens per step with drafts", f"{counts.tokens_a_step:.2f}")]


def draft_figures(counts: DraftCounts | None) -> dict[str, Any]:
    """The draft counts and their rates for JSON; empty for an engine that does not draft."""
    if counts is None:
        return {}
    return {"drafts": {**vars(counts), "acceptance": counts.acceptance, "tokens_a_step": counts.tokens_a_step}}
