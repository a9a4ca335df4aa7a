"""What the pipeline did, as data: the records that passes.json holds and `llmc passes` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llmc.graph.stage import Stage


@dataclass(frozen=True)
class RewriteRecord:
    """One rewrite. number: counted from 1 over the whole pipeline. source: the user's line, `file.py:12: code`."""

    number: int
    description: str
    nodes: tuple[str, ...]
    source: str | None


@dataclass(frozen=True)
class RefusalRecord:
    """A candidate that was left alone, and why, with actual values."""

    reason: str
    node: str
    source: str | None


@dataclass(frozen=True)
class PassRecord:
    """One pass of a pipeline run. numerics: a Numerics value; seconds: wall time, verification included.

    budget: what a lossy pass declares, as in WeightPass.
    """

    name: str
    numerics: str
    stage: Stage
    rewrites: tuple[RewriteRecord, ...]
    refusals: tuple[RefusalRecord, ...]
    seconds: float
    nodes_before: int
    nodes_after: int
    budget: float | None = None

    def to_json(self, *, timings: bool = False) -> dict[str, Any]:
        """Plain data. timings: with seconds; without, the same inputs give the same text."""
        data = asdict(self) | {"stage": self.stage.value}
        if not timings:
            del data["seconds"]
        return data
