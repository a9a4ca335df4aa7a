"""Chains and trees of drafts: what follows what, and what is left of them."""

from __future__ import annotations

import random

import pytest

from llmc.runtime.speculation.draft import NO_DRAFT, Draft
from tests.random_trees import path_to, random_tree

#  last ── 4 ── 5 ── 7
#   └── 6   └── 8
TREE = Draft([4, 5, 7, 8, 6], [None, 0, 1, 0, None])


def test_the_path_of_tokens() -> None:
    assert TREE.path([4, 5, 7, 9]) == [0, 1, 2]
    assert TREE.path([4, 8]) == [0, 3]
    assert TREE.path([5]) == NO_DRAFT.path([1]) == []
    assert Draft([4, 5]).path([4, 5, 6]) == [0, 1]
    assert TREE.depth == 3 and Draft([1, 2]).depth == 2 and NO_DRAFT.depth == 0


def test_what_is_unwanted_goes_with_all_that_follows() -> None:
    assert TREE.without(lambda path: list(path) == [4, 5]) == Draft([4, 8, 6], [None, 0, None])
    assert TREE.without(lambda path: path[0] == 4) == Draft([6], [None])
    assert Draft([1, 2, 3]).without(lambda path: len(path) > 1) == Draft([1])
    assert TREE.without(lambda path: False) is TREE


@pytest.mark.parametrize("seed", range(30))
def test_what_is_kept_has_the_paths_it_had(seed: int) -> None:
    tree = random_tree(random.Random(seed), 20)
    banned = set(tree.tokens[::4])
    left = tree.without(lambda path: path[-1] in banned)

    def paths(draft: Draft) -> set[tuple[int, ...]]:
        return {tuple(draft.tokens[member] for member in path_to(draft, node)) for node in range(len(draft))}

    assert paths(left) == {path for path in paths(tree) if not banned.intersection(path)}
    for path in paths(left):
        assert [left.tokens[node] for node in left.path(path)] == list(path)
