"""Counts of a server's drafts, read from its /metrics under vLLM's names."""

import re
from dataclasses import dataclass

_LINE = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE
)


@dataclass(frozen=True)
class DraftCounts:
    """Counts of drafts and of accepted tokens. drafts: proposals of one or more tokens, each to a request in a step."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int

    @property
    def acceptance(self) -> float:
        """The share of the drafted tokens that were accepted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def tokens_a_step(self) -> float:
        """Mean number of tokens that a request got from a step with drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """The difference to an earlier count."""
        return DraftCounts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
        )


def read_counts(metrics: str) -> DraftCounts | None:
    """Parse the counts from the text of /metrics, summed over models; None if the server does not draft."""
    totals: dict[str, int] = {}
    for name, value in _LINE.findall(metrics):
        totals[name] = totals.get(name, 0) + int(float(value))
    return DraftCounts(**totals) if len(totals) == 3 else None
