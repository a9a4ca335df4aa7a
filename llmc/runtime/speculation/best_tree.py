"""Choose the guesses for a step: the tree with a given number of nodes and the most expected accepted tokens.

A node counts as a token only if all nodes before it on its path are accepted, so its worth is the product of the
probabilities along the path. Children are never worth more than their parents: taking the best node that follows a
taken one, repeatedly, gives the best tree (Cai et al. 2024, "Medusa", and Li et al. 2024, "EAGLE-2").
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from llmc.runtime.speculation.draft import MOST_NODES, Draft


class Candidate(NamedTuple):
    """A candidate token at a depth, and its probability of being right if all before it are."""

    token: int
    probability: float


def best_tree(candidates: Sequence[Sequence[Candidate]], most: int) -> Draft:
    """The best tree of at most `most` nodes, if the candidates at a depth do not depend on the tokens before.

    candidates: by depth, the most likely first, each token once; the candidates of a depth follow each node of the
    depth before. A candidate with probability zero is never taken.
    """
    tokens: list[int] = []
    parents: list[int | None] = []
    # Nodes that may be taken next: minus their worth, a number that no other has, depth, rank, parent, its worth.
    open_nodes: list[tuple[float, int, int, int, int | None, float]] = []
    numbers = itertools.count()

    def offer(depth: int, rank: int, parent: int | None, worth: float) -> None:
        if depth < len(candidates) and rank < len(candidates[depth]):
            own = worth * candidates[depth][rank].probability
            if own > 0:
                heapq.heappush(open_nodes, (-own, next(numbers), depth, rank, parent, worth))

    offer(0, 0, None, 1.0)
    while open_nodes and len(tokens) < min(most, MOST_NODES):
        negative, _, depth, rank, parent, worth = heapq.heappop(open_nodes)
        tokens.append(candidates[depth][rank].token)
        parents.append(parent)
        offer(depth + 1, 0, len(tokens) - 1, -negative)
        offer(depth, rank + 1, parent, worth)
    return path_by_path(tokens, parents)


def best_nodes(draft: Draft, probabilities: Sequence[float], most: int) -> Draft:
    """The best part of a tree, of at most `most` nodes. probabilities: the probability of each node if all before it
    are right."""
    worth: list[float] = []
    for index, probability in enumerate(probabilities):
        parent = draft.parent(index)
        worth.append(probability if parent is None else probability * worth[parent])
    # On ties the parent comes first, because it precedes its children.
    kept = sorted(sorted(range(len(draft)), key=lambda node: -worth[node])[: min(most, MOST_NODES)])
    places = {node: place for place, node in enumerate(kept)}
    parents = [None if (parent := draft.parent(node)) is None else places[parent] for node in kept]
    return path_by_path([draft.tokens[node] for node in kept], parents)


def path_by_path(tokens: Sequence[int], parents: Sequence[int | None]) -> Draft:
    """Order a tree so that each node's first child directly follows it, and return it as a draft.

    If the most likely path is accepted, its keys and values need not be moved. A tree that is a chain becomes a chain.
    """
    children: dict[int | None, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    pending = children.get(None, [])[::-1]
    while pending:
        order.append(pending.pop())
        pending += children.get(order[-1], [])[::-1]
    places = {node: place for place, node in enumerate(order)}
    followed = [None if (parent := parents[node]) is None else places[parent] for node in order]
    is_chain = followed == [None, *range(len(order) - 1)][: len(order)]
    return Draft([tokens[node] for node in order], None if is_chain else followed)
