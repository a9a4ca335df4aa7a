"""Lookahead decoding (Fu et al. 2024, "Break the sequential dependency of LLM inference using lookahead decoding").

Drafting without a drafter: in addition to guesses to verify, a request's step has a window of tokens for later
positions, and the model's outputs after them form n-grams. N-grams that begin with the request's last token are its
guesses.

The window has `ngram` - 1 levels of `window` columns. Column c of level l is a token at the position c + l + 1 after
the last one; it sees the first level up to its column, and its column up to its level:

    last ── a0 ── a1 ── a2         level 0 │     │     │ b0    b1    b2        level 1;   the output after b1 makes the
    n-gram a1 b1 …

This is a tree, and so are the guesses: an accepted token of the window counts like an accepted guess. After the step
the levels move up by one, the outputs become the last level, and the columns move on by the request's new tokens.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc.errors import RequestError
from llmc.runtime.requests.boundary import attempts, errors
from llmc.runtime.requests.request import Request, SampledRequest
from llmc.runtime.speculation.computed_step import ComputedChunk, ComputedStep
from llmc.runtime.speculation.draft import NO_DRAFT, Draft
from llmc.runtime.speculation.drafter import EachDrafter


@dataclass(slots=True)
class _Window:
    """The lookahead window of a request. levels: [ngram - 1][columns]. read: number of the request's tokens whose
    n-grams are in the pool."""

    levels: list[list[int]]
    pool: "NgramPool"
    read: int = 0

    def path(self, column: int) -> list[int]:
        """The tokens that lead to a column's last level, and that itself."""
        first, *others = self.levels
        return [*first[: column + 1], *(level[column] for level in others)]


class LookaheadDrafter(EachDrafter):
    """Drafts n-grams that the model made itself. window: columns. ngram: tokens of an n-gram, at least 2. guesses:
    n-grams to be verified in a step."""

    def __init__(self, window: int, ngram: int, guesses: int) -> None:
        self._columns, self._levels, self._guesses = window, ngram - 1, guesses
        self._windows: dict[Request, _Window] = {}

    def observe(self, step: ComputedStep) -> Mapping[Request, RequestError]:
        """Read the tokens after the windows' last levels."""
        windows = [(self._windows.get(chunk.request), chunk, step) for chunk in step.chunks() if chunk.draft]
        read = [(window, chunk, step) for window, chunk, step in windows if window is not None]
        return errors((chunk.request for _, chunk, _ in read), attempts(self._advance, read))

    def forget(self, request: SampledRequest) -> None:
        """Drop the request's n-grams, which are not kept for other requests."""
        self._windows.pop(request, None)

    def draft(self, request: SampledRequest, most: int) -> Draft:
        """The guesses, and the columns of the window for which there is room."""
        window = self._windows.get(request)
        if window is None:
            window = self._windows[request] = self._new_window(request)
        tokens = request.tokens
        for end in range(max(window.read, self._levels) + 1, len(tokens) + 1):
            window.pool.add(tokens[end - self._levels - 1 : end])
        window.read = len(tokens)
        tree = _Tree()
        # A window that never fits would leave nothing to guess.
        room = most // 2 if most < self._levels * (self._columns + self._guesses) else self._levels * self._guesses
        for guess in window.pool.after(tokens[-1]):
            if len(tree.tokens) + len(guess) > room:
                break
            tree.add(guess)
        for column in range(min(self._columns, (most - len(tree.tokens)) // self._levels)):
            tree.add(window.path(column))
        return tree.draft()

    def _new_window(self, request: SampledRequest) -> _Window:
        """A window of tokens of the prompt, which are only a start."""
        tokens, columns = request.tokens, range(self._columns)
        levels = [[tokens[-1 - (level + column) % len(tokens)] for column in columns] for level in range(self._levels)]
        return _Window(levels, NgramPool(self._guesses))

    def _advance(self, window: _Window, chunk: ComputedChunk, step: ComputedStep) -> None:
        first = chunk.logit_row + chunk.logit_rows - len(chunk.draft)
        after = step.results.guesses(first, len(chunk.draft))
        out: list[int] = []
        for column in range(self._columns):
            path = window.path(column)
            nodes = chunk.draft.path(path)
            if len(nodes) < len(path):
                break  # There was no room for it, or a grammar forbids it.
            out.append(after[nodes[-1]])
            window.pool.add([*(level[column] for level in window.levels), out[-1]])
        moved = len(chunk.own) - 1
        # Columns that were in no step stay as they were.
        last = [*out, *window.levels[-1][len(out) :]]
        window.levels = [
            [*level[moved:], *level[: min(moved, len(level))]][: self._columns] for level in (*window.levels[1:], last)
        ]


class NgramPool:
    """N-grams by their first token, at most `most` for each: the most recent ones."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, and drop the oldest with the same first token if there are too many."""
        known = self._rest.setdefault(ngram[0], OrderedDict())
        rest = tuple(ngram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._most:
            known.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The continuations of the token in each n-gram, the most recent first."""
        return list(reversed(self._rest.get(token, ())))


class _Tree:
    """A draft that grows path by path; no token has two children with the same token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._parents: list[int | None] = []
        self._children: dict[tuple[int | None, int], int] = {}

    def add(self, path: Sequence[int]) -> None:
        """Add a path of tokens that may follow the request's last one."""
        node: int | None = None
        for token in path:
            child = self._children.get((node, token))
            if child is None:
                child = self._children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self._parents.append(node)
            node = child

    def draft(self) -> Draft:
        """The draft of the paths added until now."""
        return Draft(self.tokens, self._parents) if self.tokens else NO_DRAFT
