"""How much of a model each pass reached: "31 of 32 RMSNorms fused; 1 refused", with the refusals that explain it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from llmc.debug.coverage_quantized import QUANTIZED_RULES
from llmc.debug.coverage_rules import RULES, CoverageRule
from llmc.errors import PassError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import op_name, render_type
from llmc.graph.source_line import source_line
from llmc.options import BuildOptions
from llmc.passes.report import PassRecord, RefusalRecord

_ALL_RULES = (*RULES, *QUANTIZED_RULES)


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
        """All candidates."""
        return self.done + len(self.left)

    def __str__(self) -> str:
        asked = len(self.left) - len(self.short)
        refused = sum(bool(left.refusals) for left in self.short)
        counts = ((asked, "left alone as asked"), (refused, "refused"), (len(self.short) - refused, "left over"))
        rest = "".join(f"; {count} {how}" for count, how in counts if count)
        return f"{self.done} of {self.total} {self.what} {self.verb}{rest}"

    @property
    def short(self) -> tuple[Leftover, ...]:
        """What was left without anybody having asked for it."""
        return tuple(left for left in self.left if not left.is_asked)

    def reasons(self, left: Leftover) -> tuple[str, ...]:
        """Why something was left: its refusals, or that nothing looked at it."""
        if left.refusals:
            return tuple(r.reason for r in left.refusals)
        if self.not_run:
            return (f"did not run: {', '.join(self.not_run)}",)
        return (f"no near-miss of {', '.join(self.passes)}",)


class CoverageObserver:
    """An observer of run_pipeline. built_in: names of llmc's own passes; any other is counted by its records.

    options: of the run, which say what is to be quantized.
    """

    def __init__(self, built_in: Collection[str], options: BuildOptions) -> None:
        self._built_in = built_in
        self._options = options
        self._refusals: dict[str, tuple[RefusalRecord, ...]] = {}
        self._found: dict[CoverageRule, Coverage] = {}
        self._stage: object = None
        self._added: list[Coverage] = []

    def __call__(self, record: PassRecord, graph: ModelGraph) -> None:
        """Look again at what the graph holds, if the pass changed it or could say why something was left."""
        self._refusals[record.name] = record.refusals
        for rule in _ALL_RULES:
            concerns = record.name in rule.passes or record.stage is not self._stage or record.rewrites
            if graph.stage in rule.stages and concerns and rule.is_wanted(graph, self._options):
                before = self._found.get(rule)
                self._found[rule] = self._look(rule, graph, before.left if before is not None else ())
        self._stage = record.stage
        if record.name not in self._built_in and (record.rewrites or record.refusals):
            self._added.append(_by_record(record))

    def coverage(self) -> tuple[Coverage, ...]:
        """What was found, in the order of the rules, then of the passes that are not llmc's own."""
        return (
            *(self._found[rule] for rule in _ALL_RULES if rule in self._found and self._found[rule].total),
            *self._added,
        )

    def _look(self, rule: CoverageRule, graph: ModelGraph, before: Sequence[Leftover]) -> Coverage:
        nodes = rule.left(graph)
        refusals = [r for name in rule.passes for r in self._refusals.get(name, ())]
        known = {left.node: left.refusals for left in before if left.refusals}
        found = [known.get(n.name) or tuple(r for r in refusals if r.node in _around(n, rule.reach)) for n in nodes]
        # Later passes may have renamed what an earlier one left alone; graph order stays.
        if len(before) == len(nodes) and not any(found):
            found = [left.refusals for left in before]
        left = tuple(_leftover(n, reasons) for n, reasons in zip(nodes, found, strict=True))
        not_run = tuple(name for name in rule.passes if name not in self._refusals)
        return Coverage(rule.what, rule.verb, rule.passes, rule.done(graph), left, not_run)


def check_complete(coverage: Sequence[Coverage]) -> None:
    """Raise PassError naming everything that was not reached, with the refusals: what the option strict asks for."""
    short = [each for each in coverage if each.short]
    if not short:
        return
    summary = "; ".join(f"{each} ({'; '.join(each.reasons(each.short[0]))})" for each in short)
    first = short[0].short[0]
    sources = (*(r.source for r in first.refusals), first.source)
    raise PassError(
        f"not everything is covered: {summary}",
        at=next((s for s in sources if s is not None), first.node),
        fix="llmc explain MODEL shows each place; change the model, or build without strict",
    )


def _by_record(record: PassRecord) -> Coverage:
    left = tuple(Leftover(r.node, r.op, r.type, r.source, (r,)) for r in record.refusals)
    return Coverage(f"candidates of {record.name}", "rewritten", (record.name,), len(record.rewrites), left)


def _leftover(node: fx.Node, refusals: tuple[RefusalRecord, ...]) -> Leftover:
    op = op_name(node.target) if node.op == "call_function" else node.op
    return Leftover(node.name, op, render_type(node), source_line(node), refusals)


def _around(node: fx.Node, reach: int) -> frozenset[str]:
    """The names of the nodes within that many uses of this one, in both directions; weights and inputs lead nowhere."""
    seen, border = {node}, [node]
    for _ in range(reach):
        beside = {n for each in border for n in (*each.all_input_nodes, *each.users) if n.op == "call_function"} - seen
        seen |= beside
        border = list(beside)
    return frozenset(n.name for n in seen)
