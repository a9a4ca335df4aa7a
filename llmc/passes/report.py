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
    """One pass of a pipeline run. numerics: a Numerics value; seconds: wall time, verification included."""

    name: str
    numerics: str
    stage: Stage
    rewrites: tuple[RewriteRecord, ...]
    refusals: tuple[RefusalRecord, ...]
    seconds: float
    nodes_before: int
    nodes_after: int

    def to_json(self, *, timings: bool = False) -> dict[str, Any]:
        """Plain data. timings: with seconds; without, the same inputs give the same text."""
        data = asdict(self) | {"stage": self.stage.value}
        if not timings:
            del data["seconds"]
        return data


def record_from_json(data: dict[str, Any]) -> PassRecord:
    """The inverse of PassRecord.to_json; seconds are 0 where they were left out."""
    return PassRecord(
        name=data["name"],
        numerics=data["numerics"],
        stage=Stage(data["stage"]),
        rewrites=tuple(RewriteRecord(**r | {"nodes": tuple(r["nodes"])}) for r in data["rewrites"]),
        refusals=tuple(RefusalRecord(**r) for r in data["refusals"]),
        seconds=data.get("seconds", 0.0),
        nodes_before=data["nodes_before"],
        nodes_after=data["nodes_after"],
    )
