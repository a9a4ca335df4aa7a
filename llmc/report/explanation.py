"""The explanation of a model's passes: what they rewrote and what they left, as in an engine's report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.engine_format import read_engine
from llmc.engine_format.reader import COVERAGE_NAME, PASSES_NAME
from llmc.errors import LlmcError, OptionError
from llmc.files.typed_json import from_json, to_json
from llmc.graph.pass_record import PassRecord, RefusalRecord, RewriteRecord
from llmc.program import Program
from llmc.report.contents import read_placements
from llmc.report.coverage.coverage import Coverage
from llmc.report.placements.hf_plan import agreement, beside, hf_plan
from llmc.report.placements.record import Placements, StageRanks, stage_ranks


@dataclass(frozen=True)
class RankExplanation:
    """The division of a model among ranks. placements: the placements of weights and collectives. stages: the stages in
    order, and their ranks. plan: Hugging Face's plan, by module; empty without one."""

    placements: Placements
    stages: tuple[StageRanks, ...]
    plan: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data. `beside`: "same", or the difference from Hugging Face's plan. `agreement`: the number of
        matrices, and of those split in the same way."""
        weights = [to_json(weight) | {"beside": beside(weight, self.plan)} for weight in self.placements.weights]
        alike = agreement(self.placements.weights, self.plan) if self.plan else None
        return {**to_json(self.placements), "weights": weights, "stages": to_json(self.stages), "agreement": alike}


@dataclass(frozen=True)
class Explanation:
    """The content of `llmc explain`. passes: those that ran, in order. coverage: what they reached. error: what ended
    the pipeline early. ranks: the ranks of a model that is cut for several."""

    passes: tuple[PassRecord, ...]
    coverage: tuple[Coverage, ...]
    error: LlmcError | None = None
    ranks: RankExplanation | None = None

    def named(self, name: str) -> PassRecord:
        """The record of a pass. Raises OptionError for one that did not run, or what ended the passes before it did."""
        for record in self.passes:
            if record.name == name:
                return record
        if self.error is not None:
            raise self.error
        raise OptionError(
            f"no pass {name!r} ran",
            at=f"--pass {name}",
            fix=f"passes: {', '.join(r.name for r in self.passes)}",
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data: coverage, passes, error."""
        return {
            "coverage": [to_json(c) | {"total": c.total, "text": str(c)} for c in self.coverage],
            "passes": [to_json(p) for p in self.passes],
            "error": None if self.error is None else str(self.error),
            "ranks": None if self.ranks is None else self.ranks.to_json(),
        }


@dataclass(frozen=True)
class NodeHistory:
    """All that happened to one node. made, used: (pass, rewrite) that created it, and those that were about it."""

    made: tuple[str, RewriteRecord] | None
    used: tuple[tuple[str, RewriteRecord], ...]
    refused: tuple[tuple[str, RefusalRecord], ...]


def explain_engine(engine: Path) -> Explanation:
    """Read the explanation from the engine's own report. Raises EngineFormatError if it is missing or unreadable."""
    directory = read_engine(engine, check_weights=False, check_machine=False)
    files = directory.files
    # The file holds no times, so that builds give the same bytes.
    timed = [{**record, "seconds": 0.0} for record in files.parsed(PASSES_NAME, tuple[dict[str, Any], ...])]
    passes = from_json(tuple[PassRecord, ...], timed, str(files.path / PASSES_NAME))
    ranks = explain_ranks(read_placements(files), directory.stage_programs, directory.manifest.model.family)
    return Explanation(passes, files.parsed(COVERAGE_NAME, tuple[Coverage, ...]), ranks=ranks)


def explain_ranks(placements: Placements | None, stages: Sequence[Program], family: str) -> RankExplanation | None:
    """Explain the ranks of an engine; None for a single rank. placements: None if its weights are not split."""
    if stages[0].layout.ranks == 1:
        return None
    return RankExplanation(placements or Placements(), stage_ranks(stages), hf_plan(family))


def history(explanation: Explanation, node: str) -> NodeHistory:
    """The rewrites and refusals of a node, by name. Raises OptionError if there are none."""
    rewrites = [(p.name, r) for p in explanation.passes for r in p.rewrites]
    refusals = [(p.name, r) for p in explanation.passes for r in p.refusals]
    maker = next((entry for entry in rewrites if node in entry[1].made), None)
    used = tuple(entry for entry in rewrites if node in entry[1].nodes)
    about = tuple(
        entry
        for entry in refusals
        if node == entry[1].node or node in {n.name for n in (*entry[1].users, *entry[1].operands)}
    )
    if maker is None and not used and not about:
        raise OptionError(
            f"no rewrite and no refusal is about a node {node!r}",
            at=f"--node {node}",
            fix="node names: llmc passes MODEL --stop-after N --graph, or report/graphs/*.txt of an engine",
        )
    return NodeHistory(maker, used, about)
