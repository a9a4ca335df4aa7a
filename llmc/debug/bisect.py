"""Find the single rewrite that makes a check fail, by cutting the pipeline: first between passes, then inside one.

A cut after rewrite n holds rewrites 1 to n. The check must hold for few rewrites and fail for all of them; the search
takes log₂ of the passes and of the culprit's rewrites.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from llmc.debug.difference import BUDGETS
from llmc.errors import LlmcError, OptionError, PassError
from llmc.formats.schemes import DEFAULT_TOKENS, TokenDefault
from llmc.frontends.captured import Captured
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord, RewriteRecord
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData, in_one_line
from llmc.passes.pipeline import essential
from llmc.passes.rewrite import Numerics, Pass
from llmc.passes.runner import run_pipeline
from llmc.plural import counted


@dataclass(frozen=True)
class Pipeline:
    """The pipeline to cut: a captured model, and the passes and options applied to it.

    progress: told what passes that take long are doing. tokens: how the target rounds tokens by default.
    """

    captured: Captured
    passes: tuple[Pass, ...]
    options: BuildOptions
    progress: Callable[[str], None] = lambda doing: None
    tokens: TokenDefault = DEFAULT_TOKENS

    @property
    def data(self) -> ModelData:
        """The model data that passes may read."""
        return ModelData(
            self.captured.source,
            self.captured.tokenizer,
            in_one_line(self.progress),
            self.tokens,
        )


@dataclass(frozen=True)
class Outcome:
    """The result of checking a cut. detail: one line with figures."""

    is_good: bool
    detail: str


@dataclass(frozen=True)
class Probe:
    """One run of the check, on the pipeline cut after rewrite `number`."""

    number: int
    outcome: Outcome


# Whether the pipeline cut after that many rewrites is as it should be.
Check = Callable[[int], Outcome]


@dataclass(frozen=True)
class Outline:
    """The pipeline as it runs uncut: every rewrite with its pass, in order. error: what ended it early.

    failed_pass: the pass that raised it, if it did so before its first rewrite. numerics: the numerics of each pass.
    budgets: the budgets of the passes that declare one.
    """

    rewrites: tuple[tuple[str, RewriteRecord], ...]
    numerics: dict[str, str]
    budgets: dict[str, float]
    error: LlmcError | None = None
    failed_pass: str | None = None

    def spans(self) -> tuple[tuple[str, int, int], ...]:
        """Return each pass that rewrote anything, with its first and last number."""
        ranges: dict[str, tuple[int, int]] = {}
        for name, record in self.rewrites:
            ranges[name] = (ranges.get(name, (record.number, 0))[0], record.number)
        return tuple((name, first, last) for name, (first, last) in ranges.items())

    def lossy(self, dtype: torch.dtype) -> tuple[tuple[int, float], ...]:
        """The first rewrite of each lossy pass, with its error budget."""
        usual = BUDGETS[Numerics.LOSSY, dtype]
        return tuple(
            (first, self.budgets.get(name, usual))
            for name, first, _ in self.spans()
            if self.numerics[name] == Numerics.LOSSY.value
        )

    def at(self, number: int) -> tuple[str, RewriteRecord]:
        return self.rewrites[number - 1]


@dataclass(frozen=True)
class Culprit:
    """The first rewrite with which the check fails. good: the most rewrites with which the check holds; bad: the fewest
    with which it was seen to fail.

    rewrite: number `bad`; None if the pass failed before it made one. probes: every run of the check, in order.
    """

    pass_name: str
    numerics: str
    rewrite: RewriteRecord | None
    good: int
    bad: int
    outcome: Outcome
    probes: tuple[Probe, ...]


def outline(pipeline: Pipeline) -> Outline:
    """Run the whole pipeline once and note every rewrite. A pass that fails ends it."""
    rewrites: list[tuple[str, RewriteRecord]] = []
    done: list[PassRecord] = []
    error: LlmcError | None = None
    passes, options = pipeline.passes, pipeline.options
    try:
        run_pipeline(
            pipeline.captured.graph,
            passes,
            options,
            lambda record, _: done.append(record),
            pipeline.data,
            before_rewrite=lambda name, record, _: rewrites.append((name, record)),
            essential=essential(),
        )
    except PassError as caught:
        error = caught
    by_number = {r.number: r for record in done for r in record.rewrites}
    whole = tuple((name, by_number.get(record.number, record)) for name, record in rewrites)
    running = [p.name for p in passes if p.name not in options.disable_passes]
    failed = running[len(done)] if error is not None and len(done) < len(running) else None
    if failed is not None and any(name == failed for name, _ in rewrites):
        failed = None
    numerics = {p.name: p.numerics.value for p in passes}
    return Outline(whole, numerics, {r.name: r.budget for r in done if r.budget is not None}, error, failed)


def bisect(
    whole: Outline,
    check: Check,
    *,
    good: int = 0,
    uncut: Collection[str] = (),
    progress: Callable[[Probe], None] = lambda probe: None,
) -> Culprit:
    """Find the first rewrite with which the check fails.

    good: how many rewrites are known to pass it. uncut: passes that cannot be cut inside, since the rest of the
    pipeline needs all of them. progress: told every run. Raises OptionError where the check holds for the whole
    pipeline, or fails already for `good` rewrites.
    """
    probes: list[Probe] = []

    def holds(number: int) -> bool:
        probe = Probe(number, check(number))
        probes.append(probe)
        progress(probe)
        return probe.outcome.is_good

    numbers = [record.number for name, record in whole.rewrites if name not in uncut]
    total = numbers[-1] if numbers else 0
    if not 0 <= good <= total:
        rewrites = counted(total, "rewrite")
        raise OptionError(f"the pipeline has {rewrites}", at=f"--good {good}", fix=f"give 0 to {total}")
    if holds(total):
        raise OptionError(
            f"the check holds for the whole pipeline ({probes[-1].outcome.detail}): the search has nothing to find",
            at=f"cut after #{total}",
            fix="make the check stricter, such as a smaller --tolerance",
        )
    if not holds(good):
        raise OptionError(
            f"the check fails already there ({probes[-1].outcome.detail}): no later rewrite is to blame",
            at=f"cut after #{good}",
            fix="start from fewer rewrites with --good, or check the model and the check itself",
        )
    low, high = good, total
    ends = [last for name, _, last in whole.spans() if name not in uncut]
    for cuts in (ends, numbers):
        low, high = _search([low, *(c for c in cuts if low < c < high), high], holds)
    outcome = next(p.outcome for p in reversed(probes) if p.number == high)
    rewrite: RewriteRecord | None = None
    if whole.failed_pass is not None and high == total:
        name = whole.failed_pass
    else:
        name, rewrite = whole.at(high)
    return Culprit(name, whole.numerics[name], rewrite, low, high, outcome, tuple(probes))


def cut_graph(pipeline: Pipeline, number: int) -> ModelGraph:
    """The graph after that many rewrites. Raises PassError where a pass fails before that."""
    options = pipeline.options.model_copy(update={"stop_after": number})
    result = run_pipeline(pipeline.captured.graph, pipeline.passes, options, data=pipeline.data, essential=essential())
    return result.graph


def with_made_nodes(culprit: Culprit, graph: ModelGraph) -> Culprit:
    """The culprit, whose rewrite has the nodes that it made in the graph after it."""
    if culprit.rewrite is None or culprit.rewrite.made:
        return culprit
    title = f"#{culprit.rewrite.number} {culprit.pass_name}"
    names = tuple(n.name for n in graph.graph.nodes if n.meta.get("rewrite") == title)
    return replace(culprit, rewrite=replace(culprit.rewrite, made=names))


def _search(cuts: list[int], holds: Callable[[int], bool]) -> tuple[int, int]:
    """Binary search for two adjacent cuts, the first good and the second bad, given a good first and a bad last cut."""
    low, high = 0, len(cuts) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(cuts[middle]) else (low, middle)
    return cuts[low], cuts[high]
