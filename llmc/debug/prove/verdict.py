"""What can be said of a pass: each of its rewrites is made on a small graph, which is evaluated before and after it."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from llmc.debug.prove.compare import Comparison, Counterexample, compare
from llmc.debug.prove.evaluate import evaluate
from llmc.debug.prove.forms import Form, forms
from llmc.debug.prove.symbolic_tensor import Pool
from llmc.errors import PassError
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.match import Match, find_match
from llmc.passes.pattern import Pattern, Weight, trace_pattern
from llmc.passes.recorded_graph import recorded_copy
from llmc.passes.rewrite import GraphPass, Numerics, Pass, Rewrite
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.runner import replace

# How many bindings that the precondition refuses are looked at before a form is given up.
_REFUSED = 60


class Outcome(Enum):
    """proved: equal over the reals. compared: so found at random points, where sympy could not decide. disproved: not
    equal. skipped: nothing was looked at."""

    PROVED = "proved"
    COMPARED = "compared"
    DISPROVED = "disproved"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Verdict:
    """forms: how many graphs were looked at. reason: of what is not proved. counterexample: the first one found."""

    name: str
    outcome: Outcome
    forms: int = 0
    reason: str | None = None
    counterexample: Counterexample | None = None

    def __str__(self) -> str:
        about = self.counterexample or self.reason or f"{self.forms} form{'s' if self.forms > 1 else ''}"
        return f"{self.outcome.value}: {about}"


def prove(each: Pass) -> Verdict:
    if each.numerics is Numerics.LOSSY:
        return Verdict(each.name, Outcome.SKIPPED, reason="lossy: it changes numbers on purpose")
    if isinstance(each, Rewrite):
        found = _rewrites(each)
    elif isinstance(each, GraphPass) and each.examples:
        found = ([_run_on(each, example)] for example in each.examples)
    else:
        return Verdict(each.name, Outcome.SKIPPED, reason="a loop without examples: compared by --check-passes")
    try:
        return _of_forms(each.name, found)
    except PassError as error:
        return Verdict(each.name, Outcome.DISPROVED, reason=error.problem)


def _of_forms(name: str, forms_found: Iterable[list[Comparison | str]]) -> Verdict:
    """One verdict of what each form's examples showed; a str says why there is nothing."""
    found: list[Comparison] = []
    for count, results in enumerate(forms_found, 1):
        comparisons = [r for r in results if isinstance(r, Comparison)]
        wrong = next((c.counterexample for c in comparisons if c.counterexample is not None), None)
        if wrong is not None:
            return Verdict(name, Outcome.DISPROVED, count, counterexample=wrong)
        if not comparisons:
            return Verdict(name, Outcome.SKIPPED, count - 1, next(r for r in results if isinstance(r, str)))
        found += comparisons
    compared, proved = sum(c.compared for c in found), sum(c.proved for c in found)
    if compared:
        reason = f"{compared} of {compared + proved} elements at random points"
        return Verdict(name, Outcome.COMPARED, len(found), reason)
    return Verdict(name, Outcome.PROVED, len(found))


def _rewrites(each: Rewrite) -> Iterator[list[Comparison | str]]:
    for function in each.patterns:
        pattern = trace_pattern(function)
        for form in forms(pattern):
            yield [_rewritten(each, pattern, form, known) for known in each.examples or ({},)]


def _rewritten(each: Rewrite, pattern: Pattern, form: Form, known: Mapping[str, Any]) -> Comparison | str:
    problem, refused = "no values were found for which its ops run", None
    weights = frozenset(name for name, kind in pattern.kinds.items() if kind is Weight)
    for values in itertools.islice(form.bindings(known), _REFUSED):
        graph = Example(form.body, values, weights).graph()
        roots = [n for n in graph.graph.nodes if n.target in pattern.targets]
        pool = Pool()
        try:
            before = evaluate(graph, pool, values)
            # `applies` says where a match is meant, not what it must be.
            found = find_match((pattern.function,), roots[-1], graph, each.precondition, each.shares_interior)
        except Exception as error:  # Fakes take more shapes than references do; a precondition is the user's own.
            problem = f"{type(error).__name__}: {error}"
            continue
        if isinstance(found, Match):
            replace(found, each.replacement)
            return _compared(before, evaluate(graph, pool, values), pool)
        refused = refused or (None if found is None else f"refused: {found.reason}")
    return f"{pattern.name}: {refused or problem}; give the Rewrite `examples`"


def _run_on(each: GraphPass, example: Example) -> Comparison | str:
    graph, nodes = recorded_copy(example.graph())
    pool = Pool()
    before = evaluate(graph, pool, example.values)
    log = RewriteLog(nodes, None)
    log.begin_pass(each.name)
    each.run(graph, BuildOptions(), log)
    if not log.count:
        return f"it rewrites nothing in its example {example.body.__name__}"
    return _compared(before, evaluate(graph, pool, example.values), pool)


def _compared(before: Mapping[str, Tensor], after: Mapping[str, Tensor], pool: Pool) -> Comparison:
    pairs = []
    for name, value in before.items():
        if name not in after or after[name].shape != value.shape:
            raise PassError(f"{list(value.shape)} becomes {list(after[name].shape)}", at=name)
        places = itertools.product(*(range(size) for size in value.shape))
        if torch.equal(pool.numbers_of(value), pool.numbers_of(after[name])) and not name.startswith("result"):
            continue  # an input that is left as it is
        elements = zip(places, pool.elements(value), pool.elements(after[name]), strict=True)
        pairs += [(f"{name}{list(place)}", a, b) for place, a, b in elements]
    return compare(pairs)
