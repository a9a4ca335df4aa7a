"""Looks after every pass at what it reached and what it left."""

from collections.abc import Collection, Sequence

from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord, RefusalRecord
from llmc.graph.render import op_name, render_type
from llmc.graph.source_line import source_line
from llmc.options import BuildOptions
from llmc.report.coverage.coverage import Coverage, Leftover
from llmc.report.coverage.rule import CoverageRule
from llmc.report.coverage.rules import RULES


class CoverageObserver:
    """An observer of run_pipeline. built_in: names of llmc's own passes; any other is counted by its records.

    options: the options of the run, which say what is to be quantized.
    """

    def __init__(self, built_in: Collection[str], options: BuildOptions) -> None:
        self._built_in = built_in
        self._options = options
        self._refusals: dict[str, tuple[RefusalRecord, ...]] = {}
        self._found: dict[CoverageRule, Coverage] = {}
        self._stage: object = None
        self._added: list[Coverage] = []

    def __call__(self, record: PassRecord, graph: ModelGraph) -> None:
        """Count the graph's candidates again, if the pass changed it or may have refused some."""
        self._refusals[record.name] = record.refusals
        for rule in RULES:
            concerns = record.name in rule.passes or record.stage is not self._stage or record.rewrites
            if graph.stage in rule.stages and concerns and rule.is_wanted(graph, self._options):
                before = self._found.get(rule)
                self._found[rule] = self._look(rule, graph, before.left if before is not None else ())
        self._stage = record.stage
        if record.name not in self._built_in and (record.rewrites or record.refusals):
            self._added.append(_by_record(record))

    def coverage(self) -> tuple[Coverage, ...]:
        """Coverage by rule, in order, then by pass for passes that are not llmc's own."""
        return (
            *(self._found[rule] for rule in RULES if rule in self._found and self._found[rule].total),
            *self._added,
        )

    def _look(self, rule: CoverageRule, graph: ModelGraph, before: Sequence[Leftover]) -> Coverage:
        nodes = rule.left(graph)
        refusals = [r for name in rule.passes for r in self._refusals.get(name, ())]
        known = {left.node: left.refusals for left in before if left.refusals}
        causes = [known.get(n.name) or tuple(r for r in refusals if r.node in _around(n, rule.reach)) for n in nodes]
        # Later passes may have renamed what an earlier one left alone; graph order stays.
        if len(before) == len(nodes) and not any(causes):
            causes = [left.refusals for left in before]
        left = tuple(_leftover(n, reasons) for n, reasons in zip(nodes, causes, strict=True))
        not_run = tuple(name for name in rule.passes if name not in self._refusals)
        return Coverage(rule.what, rule.verb, rule.passes, rule.number_done(graph), left, not_run)


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
        beside = {
            n for member in border for n in (*member.all_input_nodes, *member.users) if n.op == "call_function"
        } - seen
        seen |= beside
        border = list(beside)
    return frozenset(n.name for n in seen)
