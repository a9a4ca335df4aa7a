"""Steps with trees, run by executors, against steps with the chains that they are made of."""

from __future__ import annotations

import random

import numpy as np

from llmc.runtime.executors.executor import Executor, Logits
from llmc.runtime.loop.step import Step
from llmc.runtime.speculation.draft import NO_DRAFT, Draft
from tests.random_trees import path_to, random_tree

TABLE = [3, 0, 4, 1, 2]
PROMPT = [5, 9, 2, 6, 11, 3, 8, 4, 1]


def slots(rows: list[int], block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Of rows of the request with the blocks of TABLE."""
    return np.array([TABLE[row // block_size] * block_size + row % block_size for row in rows], np.int32)


def one_request(tokens: list[int], start: int, block_size: int, draft: Draft = NO_DRAFT) -> Step:
    """A step with these tokens from row `start` on, and a draft behind them; logits of all."""
    count = len(tokens) + len(draft)
    rows = list(range(start, start + count))
    last = start + len(tokens) - 1
    return Step(
        input_ids=np.array([*tokens, *draft.tokens], np.int32),
        positions=np.array([*rows[: len(tokens)], *(last + depth for depth in draft.depths())], np.int32),
        slot_mapping=slots(rows, block_size),
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([start + count], np.int32),
        block_tables=np.array([TABLE], np.int32),
        logit_rows=np.arange(count, dtype=np.int32),
        tree_masks=np.array([*[0] * len(tokens), *draft.masks()], np.int64),
    )


def logits_of(executor: Executor, step: Step) -> Logits:
    return executor.step(step).copy()


def check_trees(
    executor: Executor, block_size: int, vocabulary: int, most: int, seed: int, tolerance: float = 0.0
) -> None:
    """A tree after the prompt, then its deepest path moved into place, then one token more: the logits of chains.

    tolerance: how far apart they may be; 0 compares bits.
    """
    draw = random.Random(seed)
    tree = random_tree(draw, most, vocabulary)
    first = len(PROMPT)
    executor.step(one_request(PROMPT, 0, block_size))
    logits = logits_of(executor, one_request([7], first, block_size, tree))
    path = path_to(tree, max(range(len(tree)), key=tree.depths().__getitem__))
    sources = slots([first + 1 + node for node in path], block_size)
    executor.move_slots(sources, slots([first + 1 + place for place in range(len(path))], block_size))
    after = logits_of(executor, one_request([13], first + 1 + len(path), block_size))
    for node in range(len(tree)):
        chain = [7, *(tree.tokens[member] for member in path_to(tree, node))]
        executor.step(one_request(PROMPT, 0, block_size))
        expected = logits_of(executor, one_request(chain, first, block_size))
        np.testing.assert_allclose(logits[1 + node], expected[-1], rtol=tolerance, atol=tolerance)
    executor.step(one_request([7, *(tree.tokens[member] for member in path)], first, block_size))
    expected = logits_of(executor, one_request([13], first + 1 + len(path), block_size))
    np.testing.assert_allclose(after, expected, rtol=tolerance, atol=tolerance)
