"""The effect of each pass, and of each rewrite, on the logits: the graph runs before and after it on the same
tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmc.debug.difference import BUDGETS, Difference, budget, difference
from llmc.debug.dump import dumped
from llmc.debug.memo_run import MemoRun, default_chunks
from llmc.errors import OptionError, PassError, did_you_mean
from llmc.formats.schemes import DEFAULT_TOKENS, TokenDefault
from llmc.frontends.captured import Captured
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord, RewriteRecord
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData, in_one_line
from llmc.passes.pipeline import essential
from llmc.passes.rewrite import Numerics, Pass
from llmc.passes.runner import run_pipeline
from llmc.program import EVERYTHING, fitted_compression


@dataclass(frozen=True)
class RewriteDifference:
    """The change caused by one rewrite. difference: None if the graph failed to run after it; error has the reason."""

    rewrite: RewriteRecord
    difference: Difference | None
    error: str | None = None


@dataclass(frozen=True)
class PassDifference:
    """The change caused by one pass, from the graph before it to the graph after it.

    budget: the relative difference that its numerics class allows. is_over: whether it changed more, or broke the
    graph. since_capture: against the logits of the captured graph. rewrites: One by one, if requested.
    """

    name: str
    numerics: str
    budget: float
    count: int
    difference: Difference | None
    since_capture: Difference | None
    rewrites: tuple[RewriteDifference, ...] = ()
    error: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the pass did more than it declared."""
        return self.difference is None or not self.difference.within(self.budget)


@dataclass(frozen=True)
class ModelDifference:
    """The difference that each pass makes to a model's logits. passes: those of the range that rewrote anything, in
    order. error: what ended the pipeline early. notes: what the figures do not show."""

    tokens: tuple[int, ...]
    dtype: torch.dtype
    passes: tuple[PassDifference, ...]
    error: PassError | None = None
    notes: tuple[str, ...] = ()

    @property
    def first_over(self) -> PassDifference | None:
        """The first pass that did more than it declared."""
        return next((pass_ for pass_ in self.passes if pass_.is_over), None)


def diff_passes(
    captured: Captured,
    passes: Sequence[Pass],
    options: BuildOptions,
    tokens: Sequence[int],
    *,
    first: str | None = None,
    last: str | None = None,
    by_rewrite: bool = False,
    progress: Callable[[str], None] = lambda name: None,
    token_default: TokenDefault = DEFAULT_TOKENS,
) -> ModelDifference:
    """Run the pipeline once, and the graph before and after each pass from `first` to `last` (both included).

    by_rewrite: also compare around every rewrite. progress: called with the name of the next run. token_default: how
    the target rounds tokens. Memory holds one graph's activations and one weight at a time. Raises OptionError if the
    range names an unknown pass.
    """
    chosen = pass_range(passes, first, last)
    runner = MemoRun(captured.source, tokens, chunk_sizes=default_chunks(len(tokens)), block_size=options.block_size)
    watcher = _Watcher(runner, captured.graph, chosen, by_rewrite, progress)
    data = ModelData(captured.source, captured.tokenizer, in_one_line(progress), token_default)
    observe = dumped(captured.graph, watcher.after_pass)
    error: PassError | None = None
    try:
        run_pipeline(
            captured.graph, passes, options, observe, data, before_rewrite=watcher.before_rewrite, essential=essential()
        )
    except PassError as caught:
        error = caught
    found, dtype = tuple(watcher.found), captured.graph.info.dtype
    return ModelDifference(tuple(tokens), dtype, found, error, _notes(options, len(tokens)))


def _notes(options: BuildOptions, tokens: int) -> tuple[str, ...]:
    """A note if KV compression drops no row of this many tokens, which are read as a prompt."""
    policy = fitted_compression(options.kv_compression, options.block_size)
    if policy == EVERYTHING or any(cut.dropped for _, cut in policy.cuts_before(tokens, tokens)):
        return ()
    dropped = f"kv_compression={policy.shown} drops no row while a prompt of {tokens} tokens is read"
    return (f"{dropped}: no difference comes from it",)


def pass_range(passes: Sequence[Pass], first: str | None, last: str | None) -> frozenset[str]:
    """The names of the passes from `first` to `last`, both included; None is the beginning or the end."""
    names = [pass_.name for pass_ in passes]
    for name in (first, last):
        if name is not None and name not in names:
            raise OptionError(
                f"there is no pass {name!r}",
                at="--passes",
                fix=f"{did_you_mean(name, names)}passes: {', '.join(names)}",
            )
    start = 0 if first is None else names.index(first)
    end = len(names) if last is None else names.index(last) + 1
    if start >= end:
        raise OptionError(f"{first} runs after {last}", at=f"--passes {first}..{last}", fix=f"write {last}..{first}")
    return frozenset(names[start:end])


class _Watcher:
    """Sees the pipeline go by; keeps the logits of the graph as it was last run."""

    def __init__(
        self,
        runner: MemoRun,
        captured: ModelGraph,
        chosen: frozenset[str],
        by_rewrite: bool,
        progress: Callable[[str], None],
    ) -> None:
        self.found: list[PassDifference] = []
        self._runner = runner
        self._chosen = chosen
        self._by_rewrite = by_rewrite
        self._progress = progress
        self._dtype = captured.info.dtype
        progress("captured")
        self._captured = runner.logits(captured)
        self._before_pass: Tensor | None = None
        self._chunks: tuple[int, ...] = ()
        self._latest: Tensor = self._captured
        self._pending: RewriteRecord | None = None
        self._rewrites: list[RewriteDifference] = []
        self._error: PassError | None = None

    def before_rewrite(self, name: str, record: RewriteRecord, graph: ModelGraph) -> None:
        if name not in self._chosen or self._error is not None:
            return
        if self._before_pass is None:
            self._progress(f"before {name}")
            self._chunks = self._runner.chunks(graph)
            self._latest = self._before_pass = self._runner.logits(graph)
        elif self._by_rewrite:
            self._measure(graph)
        self._pending = record
        if self._by_rewrite:
            self._progress(f"{name} #{record.number}")

    def after_pass(self, record: PassRecord, graph: ModelGraph) -> None:
        if self._before_pass is None:
            return
        self._progress(record.name)
        self._measure(graph)
        known = {rewrite.number: rewrite for rewrite in record.rewrites}
        rewrites = tuple(replace(d, rewrite=known[d.rewrite.number]) for d in self._rewrites if self._by_rewrite)
        whole = None if self._error else difference(self._latest, self._before_pass)
        since = None if self._error else difference(self._latest, self._captured)
        allowed = budget(record, self._dtype)
        if self._runner.chunks(graph) != self._chunks:
            # The run itself is cut into steps from here on: products of fewer rows, whose sums have another order.
            allowed = max(allowed, BUDGETS[Numerics.REORDER, self._dtype])
        error = None if self._error is None else str(self._error.problem)
        self.found.append(
            PassDifference(record.name, record.numerics, allowed, len(record.rewrites), whole, since, rewrites, error)
        )
        self._before_pass, self._pending, self._rewrites = None, None, []

    def _measure(self, graph: ModelGraph) -> None:
        """Run the graph after the pending rewrite; once it does not run, nothing after is compared."""
        if self._error is not None or self._pending is None:
            return
        before = self._latest
        try:
            self._latest = self._runner.logits(graph)
        except PassError as error:
            self._error = error
            self._rewrites.append(RewriteDifference(self._pending, None, error.problem))
            return
        self._rewrites.append(RewriteDifference(self._pending, difference(self._latest, before)))
