"""How much of a model each pass reached: "31 of 32 RMSNorms fused; 1 refused", with the refusals that explain it."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.errors import PassError
from llmc.graph.pass_record import RefusalRecord


@dataclass(frozen=True)
class Leftover:
    """A candidate that was not reached: its node, and the refusals of the passes that could have.

    type: as float32[T, 64]. refusals: empty if no pass took it for a near-miss.
    """

    node: str
    op: str
    type: str
    source: str | None
    refusals: tuple[RefusalRecord, ...]

    @property
    def is_asked(self) -> bool:
        """Whether the user or the checkpoint wants it so."""
        return bool(self.refusals) and all(refusal.is_asked for refusal in self.refusals)


@dataclass(frozen=True)
class Coverage:
    """`done` of done + len(left) `what` are `verb`, by `passes`. not_run: those of them that did not run."""

    what: str
    verb: str
    passes: tuple[str, ...]
    done: int
    left: tuple[Leftover, ...]
    not_run: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """The number of all candidates."""
        return self.done + len(self.left)

    def __str__(self) -> str:
        requested = len(self.left) - len(self.short)
        refused = sum(bool(left.refusals) for left in self.short)
        counts = (
            (requested, "left alone as requested"),
            (refused, "refused"),
            (len(self.short) - refused, "left over"),
        )
        rest = "".join(f"; {count} {how}" for count, how in counts if count)
        return f"{self.done} of {self.total} {self.what} {self.verb}{rest}"

    @property
    def short(self) -> tuple[Leftover, ...]:
        """Operations that were left although no option asked for that."""
        return tuple(left for left in self.left if not left.is_asked)

    def reasons(self, left: Leftover) -> tuple[str, ...]:
        """Return why something was left: its refusals, or that no pass examined it."""
        if left.refusals:
            return tuple(r.reason for r in left.refusals)
        if self.not_run:
            return (f"did not run: {', '.join(self.not_run)}",)
        return (f"no near-miss of {', '.join(self.passes)}",)


def check_complete(coverage: Sequence[Coverage]) -> None:
    """Raise PassError naming everything that was not reached, with the refusals: what the option strict asks for."""
    short = [partial for partial in coverage if partial.short]
    if not short:
        return
    summary = "; ".join(f"{partial} ({'; '.join(partial.reasons(partial.short[0]))})" for partial in short)
    first = short[0].short[0]
    sources = (*(r.source for r in first.refusals), first.source)
    raise PassError(
        f"not everything is covered: {summary}",
        at=next((s for s in sources if s is not None), first.node),
        fix="see each place: llmc explain MODEL; change the model, or build without strict",
    )
