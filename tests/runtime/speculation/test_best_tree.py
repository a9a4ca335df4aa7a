"""Trees of the guesses that are most likely to come true."""

from __future__ import annotations

import itertools
import random

import pytest

from llmc.runtime.speculation.best_tree import Candidate, best_nodes, best_tree, path_by_path
from llmc.runtime.speculation.draft import MOST_NODES, Draft


def expected(draft: Draft, probability: dict[tuple[int, int], float]) -> float:
    """Tokens that come true, by the probability of each token at each depth."""
    worth: list[float] = []
    for index, (token, depth) in enumerate(zip(draft.tokens, draft.depths(), strict=True)):
        parent = draft.parent(index)
        worth.append(probability[depth, token] * (1.0 if parent is None else worth[parent]))
    return sum(worth)


def best_of_all(candidates: list[list[Candidate]], most: int) -> float:
    """The same of the best tree, by the worth of every path there is."""
    worths = [
        [c.probability for c in path]
        for depth in range(1, len(candidates) + 1)
        for path in itertools.product(*candidates[:depth])
    ]
    products = []
    for path in worths:
        product = 1.0
        for probability in path:
            product *= probability
        products.append(product)
    return sum(sorted(products, reverse=True)[:most])


@pytest.mark.parametrize("seed", range(20))
def test_no_tree_is_better(seed: int) -> None:
    draw = random.Random(seed)
    candidates = []
    for depth in range(3):
        shares = sorted((draw.random() for _ in range(4)), reverse=True)
        candidates.append([Candidate(10 * depth + rank, share / 4) for rank, share in enumerate(shares)])
    probability = {(d + 1, c.token): c.probability for d, those in enumerate(candidates) for c in those}
    for most in (1, 2, 5, 17, 40):
        tree = best_tree(candidates, most)
        assert len(tree) == most
        assert expected(tree, probability) == pytest.approx(best_of_all(candidates, most))


def test_one_candidate_a_depth_is_a_chain() -> None:
    assert best_tree([[Candidate(4, 0.9)], [Candidate(5, 0.8)], [Candidate(6, 0.0)]], 9) == Draft([4, 5])
    assert best_tree([], 9) == best_tree([[Candidate(4, 0.9)]], 0) == Draft([])


def test_the_likeliest_path_stands_at_its_place() -> None:
    """Its keys and values need not be moved."""
    tree = best_tree([[Candidate(1, 0.6), Candidate(2, 0.3)], [Candidate(3, 0.5), Candidate(4, 0.4)]], 6)
    assert tree == Draft([1, 3, 4, 2, 3, 4], [None, 0, 0, None, 3, 3])
    assert tree.depths() == [1, 2, 2, 1, 2, 2]


def test_a_tree_has_no_more_nodes_than_a_mask_has_bits() -> None:
    wide = [[Candidate(rank, 0.01) for rank in range(90)]]
    assert len(best_tree(wide, 90)) == MOST_NODES


def test_the_best_nodes_of_a_tree_keep_their_parents() -> None:
    tree = Draft([1, 2, 3, 4, 5], [None, None, 0, 1, 3])
    assert best_nodes(tree, [0.5, 0.4, 0.1, 0.9, 1.0], 4) == Draft([1, 2, 4, 5], [None, None, 1, 2])
    assert best_nodes(tree, [0.3, 0.4, 0.1, 0.9, 1.0], 3) == Draft([2, 4, 5])
    assert best_nodes(Draft([7, 8, 9]), [0.5, 0.5, 0.5], 2) == Draft([7, 8])


@pytest.mark.parametrize("seed", range(20))
def test_reordering_changes_no_path(seed: int) -> None:
    draw = random.Random(seed)
    parents = [draw.choice([None, *range(i)]) for i in range(12)]

    def paths(draft: Draft) -> set[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for index, token in enumerate(draft.tokens):
            parent = draft.parent(index)
            found.append((token,) if parent is None else (*found[parent], token))
        return set(found)

    assert paths(path_by_path(range(12), parents)) == paths(Draft(range(12), parents))
