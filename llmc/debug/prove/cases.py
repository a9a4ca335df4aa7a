"""The cases of a form that are examined: one that its rewrite accepts, then others with another value of one wildcard.

A rewrite that is right for one value may drop what it should read, so each value of each wildcard that is accepted at
all is in a case, and so are shapes that are broadcast.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmc.debug.prove.evaluate import evaluate
from llmc.debug.prove.forms import Form
from llmc.debug.prove.symbolic_tensor import Pool
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.passes.example import Example, ExampleFakes
from llmc.passes.match import Match, find_match
from llmc.passes.pattern import Pattern, Weight
from llmc.passes.rewrite import Rewrite

# How many bindings that the precondition refuses are examined before a form, or one value of a wildcard, is given up,
# and how many calls are made to find bindings with that value.
_REFUSED, _REFUSED_VALUES, _TRIES = 60, 2, 100


@dataclass(frozen=True)
class Case:
    """A form with values for its wildcards for which the rewrite's pattern holds. before: the form's outputs over the
    pool."""

    values: Mapping[str, Any]
    graph: ModelGraph
    match: Match
    pool: Pool
    before: Mapping[str, Tensor]

    def constants(self) -> dict[str, str]:
        """The values of wildcards that are not tensors, as text."""
        return {name: repr(value) for name, value in self.values.items() if not isinstance(value, tuple | Tensor)}


class Cases:
    """The cases of one form. problem: the reason if no case was found. fakes: the fake values shared by all forms."""

    def __init__(self, rewrite: Rewrite, pattern: Pattern, form: Form, fakes: ExampleFakes) -> None:
        self._rewrite, self._pattern, self._form, self._fakes = rewrite, pattern, form, fakes
        self._weights = frozenset(name for name, kind in pattern.kinds.items() if kind is Weight)
        self._looked_at: set[str] = set()
        self._seen: list[tuple[str, Any]] = []
        self._refused: str | None = None
        self._failed = "no values were found for which its ops run"

    @property
    def problem(self) -> str:
        return f"{self._pattern.name}: {self._refused or self._failed}"

    def found(self, known: Mapping[str, Any]) -> Iterator[Case]:
        """Yield a case with these values, then cases with values that no earlier case had."""
        first = self._first(itertools.islice(self._form.bindings(known), _REFUSED))
        if first is None:
            return
        yield first
        self._seen += first.values.items()
        for name, value in first.values.items():
            for values in self._others(name, value):
                unseen = (
                    value for value in values if not any(_is_same((name, value), earlier) for earlier in self._seen)
                )
                case = next(filter(None, (self._with(name, value, first, known) for value in unseen)), None)
                if case is not None:
                    self._seen += case.values.items()
                    yield case

    def _with(self, name: str, value: Any, first: Case, known: Mapping[str, Any]) -> Case | None:
        """A case in which a wildcard has this value: the first one otherwise, or others where the ops need them."""
        near = self._form.bindings({**first.values, name: value})
        other = iter(()) if isinstance(value, tuple) else self._form.bindings({**known, name: value}, _TRIES)
        return self._first(itertools.islice(itertools.chain(near, other), _REFUSED_VALUES))

    def _others(self, name: str, value: Any) -> Iterator[Sequence[Any]]:
        """Yield lists of other values; one value from each list is enough."""
        domain = () if isinstance(value, Tensor) else self._form.domain(name)
        shapes = [shape for shape in domain if isinstance(shape, tuple)]
        if isinstance(value, tuple) and self._form.broadcasts(name):
            yield from ([(*value[:i], 1, *value[i + 1 :])] for i in range(len(value)))
            yield [value[1:]]
        elif not isinstance(value, tuple):
            yield shapes
        yield from ([choice] for choice in domain if choice not in shapes)

    def _first(self, bindings: Iterable[Mapping[str, Any]]) -> Case | None:
        return next(filter(None, map(self._case, bindings)), None)

    def _case(self, values: Mapping[str, Any]) -> Case | None:
        if (key := repr(sorted(values.items(), key=lambda item: item[0]))) in self._looked_at:
            return None
        self._looked_at.add(key)
        pool, rewrite = Pool(), self._rewrite
        try:
            graph = Example(self._form.body, values, self._weights).graph(fakes=self._fakes)
            root = [n for n in graph.graph.nodes if n.target in self._pattern.targets][-1]
            # `applies` says to which matches the rewrite applies, not what they must be.
            functions = (self._pattern.function,)
            match = find_match(functions, root, graph, rewrite.precondition, rewrite.shares_interior)
            if isinstance(match, Match):
                return Case(values, graph, match, pool, evaluate(graph, pool, values))
        except Exception as error:  # Fakes take more shapes than references do; a precondition is the user's own.
            self._failed = f"{type(error).__name__}: {error}"
            return None
        if isinstance(match, Refusal):
            self._refused = self._refused or f"refused: {match.reason}"
        return None


def _is_same(value: tuple[str, Any], other: tuple[str, Any]) -> bool:
    # 0 and False are not.
    return type(value[1]) is type(other[1]) and bool(value == other)
