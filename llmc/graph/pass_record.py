"""Records of the pipeline's rewrites, which passes.json holds and `llmc passes` prints."""

from dataclasses import asdict, dataclass
from typing import Any

from llmc.graph.stage import Stage


@dataclass(frozen=True)
class RewriteRecord:
    """One rewrite. number: counted from 1 over the whole pipeline. source: the user's line, `file.py:12: code`.

    nodes: those that it was about, as they were called before. made: those that it created.
    """

    number: int
    description: str
    nodes: tuple[str, ...]
    source: str | None
    made: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeRecord:
    """A node as it was seen: its op, its dtype and shape as float32[T, 64], the user's line."""

    name: str
    op: str
    type: str
    source: str | None


@dataclass(frozen=True)
class RefusalRecord:
    """A candidate that was left alone, and why, with actual values.

    expected, found: the two sides of the reason, where it compares. op, type: the op and type of the node. operands:
    the nodes that it reads. users: everything that uses it; extra_users: the names of those that are in the way.
    is_asked: as in Refusal.
    """

    reason: str
    node: str
    source: str | None
    expected: str | None = None
    found: str | None = None
    op: str = ""
    type: str = ""
    operands: tuple[NodeRecord, ...] = ()
    users: tuple[NodeRecord, ...] = ()
    extra_users: tuple[str, ...] = ()
    is_asked: bool = False


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

    def to_json(self) -> dict[str, Any]:
        """Plain data, without seconds: the same inputs give the same text."""
        data = asdict(self) | {"stage": self.stage.value}
        del data["seconds"]
        return data
