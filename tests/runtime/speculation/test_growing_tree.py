"""Trees that are drafted level by level: hardly any are better, and rows, masks and depths are those of a draft."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from llmc.runtime.speculation.best_tree import Candidate
from llmc.runtime.speculation.growing_tree import GrowingTree

Shares = Callable[[tuple[int, ...]], Sequence[float]]


def grown(tree: GrowingTree, shares: Shares) -> GrowingTree:
    """Token i may follow each path with its share; what is known at a node is the sum of its path."""
    tree.grow(None, [Candidate(*share) for share in enumerate(shares(()))], np.zeros(1, np.float32))
    rows: dict[int, int] = {}
    while (level := tree.next_level()) is not None:
        for row, node in enumerate(level.nodes, level.first):
            assert rows.setdefault(node, row) == row, "read twice, in another row"
        for place, node in enumerate(level.nodes):
            path, row = tree.path(node), rows[node]
            assert level.tokens[place] == path[-1] and level.depths[place] == len(path)
            assert level.hidden[place] == sum(path[:-1])
            seen = {rows[member] for member in rows if tree.path(member) == path[: len(tree.path(member))]}
            assert [bool(level.masks[place] >> (row - other) & 1) for other in range(row)] == [
                other not in seen for other in range(row)
            ]
            tree.grow(
                node, [Candidate(*share) for share in enumerate(shares(tuple(path)))], np.full(1, sum(path), np.float32)
            )
        assert len(level.nodes) == 1 or level.masks[-1], "which says that there is a tree"
        assert len(level.nodes) > 1 or not level.masks[-1]
    return tree


def worth(shares: Shares, path: Sequence[int]) -> float:
    product = 1.0
    for depth, token in enumerate(path):
        product *= shares(tuple(path[:depth]))[token]
    return product


@pytest.mark.parametrize("seed", range(20))
def test_no_tree_is_better(seed: int) -> None:
    known: dict[tuple[int, ...], list[float]] = {}
    draw = random.Random(seed)

    def shares(path: tuple[int, ...]) -> list[float]:
        if path not in known:
            weights = sorted((draw.random() ** 2 for _ in range(3)), reverse=True)
            known[path] = [share / (sum(weights) + 0.1) for share in weights]
        return known[path]

    for most in (1, 2, 4, 6):
        draft = grown(GrowingTree(most, 6), shares).draft()
        paths: list[list[int]] = []
        for node, token in enumerate(draft.tokens):
            parent = draft.parent(node)
            paths.append([*([] if parent is None else paths[parent]), token])
        best = sorted(
            (worth(shares, path) for depth in range(1, most + 1) for path in itertools.product(range(3), repeat=depth)),
            reverse=True,
        )[:most]
        assert len(draft) == most
        # Rows for reading are as few as nodes, which may cost a node that is hardly better.
        assert sum(worth(shares, path) for path in paths) >= 0.97 * sum(best)


def test_one_candidate_each_makes_a_chain() -> None:
    draft = grown(GrowingTree(4, 1), lambda path: [1.0]).draft()
    assert (list(draft.tokens), draft.parents) == ([0, 0, 0, 0], None)


def test_what_is_sure_is_deep_and_what_is_not_is_broad() -> None:
    assert grown(GrowingTree(6, 3), lambda path: [0.95, 0.02]).draft().depth >= 5
    assert grown(GrowingTree(6, 3), lambda path: [0.1] * 8).draft().depth == 1


def test_nothing_follows_what_has_no_candidates() -> None:
    draft = grown(GrowingTree(5, 2), lambda path: [0.5, 0.0, 0.3] if len(path) < 2 else []).draft()
    assert draft.depth == 2 and 1 not in draft.tokens
    assert len(grown(GrowingTree(5, 2), lambda path: []).draft()) == 0


def test_a_node_that_is_alone_in_its_level_is_read_with_the_one_before() -> None:
    """GPUs look at masks only of requests with two tokens or more: `grown` checks each level."""
    table: dict[tuple[int, ...], list[float]] = {(): [0.6, 0.4], (0,): [0.1], (1,): [0.9], (1, 0): [0.9]}
    draft = grown(GrowingTree(4, 2), lambda path: table.get(path, [])).draft()
    assert draft.depth == 3
