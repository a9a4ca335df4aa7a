"""Trees of drafts of every kind: chains, stars, and all between."""

from __future__ import annotations

import random

from llmc.runtime.speculation.draft import Draft


def random_tree(draw: random.Random, nodes: int, vocabulary: int = 100) -> Draft:
    """A tree of so many nodes; children of one parent have different tokens."""
    straight = draw.random()
    parents: list[int | None] = []
    taken: dict[int | None, set[int]] = {}
    tokens: list[int] = []
    for index in range(nodes):
        places: list[int | None] = [None, *range(index)]
        parent = places[-1] if draw.random() < straight else draw.choice(places)
        token = draw.randrange(vocabulary)
        while token in taken.get(parent, ()):
            token = (token + 1) % vocabulary
        tokens.append(token)
        taken.setdefault(parent, set()).add(tokens[-1])
        parents.append(parent)
    return Draft(tokens, parents)


def path_to(draft: Draft, node: int) -> list[int]:
    """The nodes that lead to a node, and itself."""
    parent = draft.parent(node)
    return [node] if parent is None else [*path_to(draft, parent), node]
