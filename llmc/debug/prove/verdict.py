"""Verdicts on passes: each rewrite is made on a small graph, which is evaluated before and after it."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from llmc.debug.prove.cases import Case, Cases
from llmc.debug.prove.compare import Comparer, Comparison, Counterexample, with_constants
from llmc.debug.prove.evaluate import evaluate
from llmc.debug.prove.forms import forms
from llmc.debug.prove.symbolic_tensor import NotOverSymbols, Pool
from llmc.errors import PassError
from llmc.passes.example import Example, ExampleFakes
from llmc.passes.pattern import trace_pattern
from llmc.passes.recorded_graph import recorded_copy
from llmc.passes.rewrite import GraphPass, Numerics, Pass, Rewrite
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.runner import replace as put_in_place


class Outcome(Enum):
    """The outcome of a proof. proved: equal over the reals. compared: so found at random points, where sympy could not
    decide. disproved: not equal. skipped: nothing was examined."""

    PROVED = "proved"
    COMPARED = "compared"
    DISPROVED = "disproved"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a proof, with its details. forms: number of pattern forms, or examples, that were examined. cases:
    number of graphs, which differ in the values of wildcards. reason: the reason if the pass is not proved.
    counterexample: the first one found."""

    name: str
    outcome: Outcome
    forms: int = 0
    cases: int = 0
    reason: str | None = None
    counterexample: Counterexample | None = None

    def __str__(self) -> str:
        seen = _count(self.forms, "form") + (f", {_count(self.cases, 'case')}" if self.cases > self.forms else "")
        return f"{self.outcome.value}: {self.counterexample or self.reason or seen}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def prove(graph_pass: Pass) -> Verdict:
    if graph_pass.numerics is Numerics.LOSSY:
        return Verdict(graph_pass.name, Outcome.SKIPPED, reason="lossy: it changes numbers on purpose")
    if isinstance(graph_pass, Rewrite):
        patterns = [trace_pattern(function) for function in graph_pass.patterns]
        fakes = ExampleFakes()
        comparisons = (
            _of_cases(graph_pass, Cases(graph_pass, pattern, form, fakes))
            for pattern in patterns
            for form in forms(pattern)
        )
        return _of_forms(graph_pass.name, comparisons)
    if isinstance(graph_pass, GraphPass) and graph_pass.examples:
        return _of_forms(graph_pass.name, ([_run_on(graph_pass, example)] for example in graph_pass.examples))
    reason = None if isinstance(graph_pass, Rewrite) else graph_pass.unproved
    return Verdict(
        graph_pass.name, Outcome.SKIPPED, reason=reason or "a loop without examples: compared by --check-passes"
    )


def _of_forms(name: str, attempts: Iterable[Iterable[Comparison]]) -> Verdict:
    """Combine the comparisons of all cases of each form into one verdict."""
    proved = compared = cases = count = 0
    problem: str | None = None
    try:
        for count, comparisons in enumerate(attempts, 1):
            for comparison in comparisons:
                if comparison.counterexample is not None:
                    return Verdict(name, Outcome.DISPROVED, count, cases + 1, counterexample=comparison.counterexample)
                problem = problem or comparison.problem
                cases += comparison.problem is None
                proved, compared = proved + comparison.proved, compared + comparison.compared
    except PassError as error:
        return Verdict(name, Outcome.DISPROVED, count, cases + 1, error.problem)
    if problem is not None:
        return Verdict(name, Outcome.SKIPPED, 0, cases, problem)
    if compared:
        reason = f"{compared} of {compared + proved} elements at random points"
        return Verdict(name, Outcome.COMPARED, count, cases, reason)
    return Verdict(name, Outcome.PROVED, count, cases)


def _of_cases(rewrite: Rewrite, cases: Cases) -> Iterator[Comparison]:
    comparer = Comparer()
    instances = itertools.chain.from_iterable(map(cases.found, rewrite.examples or ({},)))
    is_found = False
    for case in instances:
        is_found = True
        yield _rewritten(rewrite, case, comparer)
    if not is_found:
        yield Comparison(0, 0, problem=f"{cases.problem}; give the Rewrite `examples`")


def _rewritten(rewrite: Rewrite, case: Case, comparer: Comparer) -> Comparison:
    """Compare a match before and after its rewrite. Raises PassError if the replacement cannot be put in its place."""
    constants = with_constants(case.constants())
    try:
        put_in_place(case.match, rewrite.replacement)
    except PassError as error:
        raise PassError(f"{error.problem}{constants}", at=error.at) from error
    except Exception as error:
        raise PassError(f"the replacement fails: {_first_line(error)}{constants}") from error
    try:
        after = evaluate(case.graph, case.pool, case.values)
    except Exception as error:  # The replacement may be any op, also one that has no meaning over symbols.
        return Comparison(0, 0, problem=f"after it: {_first_line(error)}{constants}")
    comparison = _compared(case.before, after, case.pool, comparer)
    if comparison.counterexample is None:
        return comparison
    return replace(comparison, counterexample=replace(comparison.counterexample, constants=case.constants()))


def _first_line(error: Exception) -> str:
    # torch's messages continue with whole signatures.
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _run_on(graph_pass: GraphPass, example: Example) -> Comparison:
    graph, nodes = recorded_copy(example.graph())
    pool = Pool()
    try:
        before = evaluate(graph, pool, example.values)
    except NotOverSymbols as error:
        return Comparison(0, 0, problem=f"{example.body.__name__}: {error}")
    log = RewriteLog(nodes, None)
    log.begin_pass(graph_pass.name)
    graph_pass.run(graph, example.options, log)
    if not log.count:
        return Comparison(0, 0, problem=f"it rewrites nothing in its example {example.body.__name__}")
    return _compared(before, evaluate(graph, pool, example.values), pool, Comparer())


def _compared(before: Mapping[str, Tensor], after: Mapping[str, Tensor], pool: Pool, comparer: Comparer) -> Comparison:
    pairs = []
    for name, value in before.items():
        if name not in after or after[name].shape != value.shape:
            now = list(after[name].shape) if name in after else "nothing"
            raise PassError(f"{name}, {list(value.shape)}, becomes {now}", at=name)
        places = itertools.product(*(range(size) for size in value.shape))
        if torch.equal(pool.numbers_of(value), pool.numbers_of(after[name])) and not name.startswith("result"):
            continue  # an input that is left as it is
        elements = zip(places, pool.elements(value), pool.elements(after[name]), strict=True)
        pairs += [(f"{name}{list(place)}", a, b) for place, a, b in elements]
    return comparer.compare(pairs)
