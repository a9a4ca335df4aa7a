"""Find layers: runs of nodes that are the same computation over and over, so that one can be shown for all.

Two stretches are the same if their nodes have the same ops, types and arguments, and take their inputs from the same
places: within the stretch, from the one before it, from weights whose names differ only in numbers, or from the same
node outside.
"""

import re
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from llmc.graph.graph_text import NodeText

_REFERENCE = re.compile(r"%\w+")
_NUMBER = re.compile(r"\d+")
# A shorter stretch is easier read than its summary.
_SHORTEST = 4
_CANDIDATES = 8


@dataclass(frozen=True)
class Repeat:
    """`count` stretches of `period` nodes from index `start` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The index after the last of them."""
        return self.start + self.period * self.count


def find_repeats(nodes: Sequence[NodeText]) -> tuple[Repeat, ...]:
    """The repeats among nodes that compute (placeholders left out), in order; they do not overlap."""
    index = {node.name: i for i, node in enumerate(nodes)}
    numbers: dict[tuple[str, ...], int] = {}
    tokens = [numbers.setdefault(node_token(node, index), len(numbers)) for node in nodes]
    return repeats_of(tokens, [tuple(index[name] for name in node.inputs if name in index) for node in nodes])


def node_token(node: NodeText, computed: Container[str]) -> tuple[str, ...]:
    """The key that is equal in all layers: op, type, and arguments without the names of `computed` nodes."""

    def masked(match: re.Match[str]) -> str:
        return "%" if match[0][1:] in computed else _NUMBER.sub("#", match[0])

    return (str(node.op), node.type, _REFERENCE.sub(masked, node.arguments))


def repeats_of(tokens: Sequence[int], inputs: Sequence[tuple[int, ...]]) -> tuple[Repeat, ...]:
    """`find_repeats` for nodes given as numbers, equal for equal `node_token`, and the indices of their inputs."""
    repeats: list[Repeat] = []
    _search(tokens, inputs, 0, len(tokens), repeats)
    return tuple(sorted(repeats, key=lambda repeat: repeat.start))


def _search(
    tokens: Sequence[int], inputs: Sequence[tuple[int, ...]], begin: int, end: int, repeats: list[Repeat]
) -> None:
    """The repeat that covers most of tokens[begin:end], then those before and after it."""
    best = max(
        (_longest(tokens, inputs, begin, end, period) for period in _periods(tokens, begin, end)),
        key=lambda repeat: (repeat.end - repeat.start, -repeat.period),
        default=None,
    )
    if best is None or best.count < 2:
        return
    repeats.append(best)
    _search(tokens, inputs, begin, best.start, repeats)
    _search(tokens, inputs, best.end, end, repeats)


def _periods(tokens: Sequence[int], begin: int, end: int) -> list[int]:
    """The commonest distances between a token and its next occurrence."""
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for i in range(begin, end):
        if tokens[i] in last:
            gaps[i - last[tokens[i]]] += 1
        last[tokens[i]] = i
    return [gap for gap, _ in gaps.most_common(_CANDIDATES * 4) if gap >= _SHORTEST][:_CANDIDATES]


def _longest(tokens: Sequence[int], inputs: Sequence[tuple[int, ...]], begin: int, end: int, period: int) -> Repeat:
    """The longest run of stretches of that length; one of count 1 or less if there is none."""
    best, start = Repeat(begin, period, 1), begin
    while start + 2 * period <= end:
        run = start
        while run + period < end and tokens[run] == tokens[run + period]:
            run += 1
        count = 1 + (run - start) // period
        while count >= 2 and not _same_inputs(inputs, start, period, count):
            count -= 1
        if count > best.count:
            best = Repeat(start, period, count)
        if count >= 2:
            start += period * count
        else:  # Alike, but wired otherwise somewhere: stretches that begin later may be the same.
            start = start + 1 if run - start >= period else run + 1
    return best


def _same_inputs(inputs: Sequence[tuple[int, ...]], start: int, period: int, count: int) -> bool:
    """Whether each stretch takes its inputs from where the one before it does, as seen from there."""
    # The first stretch takes from outside what the others take from the one before, each time from the same node.
    entering: dict[int, int] = {}
    for i in range(start + period, start + period * count):
        is_second = i < start + 2 * period
        for now, before in zip(inputs[i], inputs[i - period], strict=True):
            if is_second and before < start <= now:
                if entering.setdefault(now, before) != before:
                    return False
            elif now != before + period and not (now == before and now < start):
                return False
    return True
