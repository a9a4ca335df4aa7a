"""Ragged batches in which some requests bring trees of drafts."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from llmc.runtime.speculation.draft import Draft
from tests.codegen.cpp.paged_batch import PagedBatch, paged_batch
from tests.random_trees import random_tree

BLOCK_SIZES = (1, 8, 16, 24, 128)


def with_trees(batch: PagedBatch, trees: dict[int, Draft]) -> PagedBatch:
    """Some requests bring their last token and a tree."""
    masks = torch.zeros(len(batch.q), dtype=torch.int64)
    for request, tree in trees.items():
        begin = int(batch.query_starts[request])
        masks[begin + 1 : begin + 1 + len(tree)] = torch.tensor(tree.masks())
    return replace(batch, tree_masks=masks)


def random_case(seed: int) -> tuple[PagedBatch, dict[int, Draft]]:
    """A batch of trees, a chunk, a chain and a decode."""
    draw = random.Random(seed)
    trees = {0: random_tree(draw, draw.choice([1, 2, 5, 16, 63])), 2: random_tree(draw, draw.randint(1, 20))}
    requests = [(len(tree) + 1 + draw.choice([0, 1, 40, 63, 100, 1010]), len(tree) + 1) for tree in trees.values()]
    dtype = draw.choice([torch.float32, torch.bfloat16])
    kv_heads = draw.choice([1, 2, 3])
    batch = paged_batch(
        [requests[0], (70, 30), requests[1], (draw.randint(1, 200), 1), (90, 5)],
        heads=kv_heads * draw.choice([1, 3, 4]),
        kv_heads=kv_heads,
        head_dim=draw.choice([16, 32]),
        block_size=draw.choice(BLOCK_SIZES),
        dtype=dtype,
        cache_dtype=draw.choice([torch.float32, torch.bfloat16]) if dtype is torch.float32 else dtype,
        window=draw.choice([None, None, 3, 30, 1000]),
        softcap=draw.choice([None, 2.0]),
        sinks=draw.random() < 0.3,
        slopes=draw.random() < 0.3,
        chunk=draw.choice([None, None, 7, 64]),
        pinned=draw.choice([None, None, 2, 40]),
        seed=seed,
    )
    return batch, trees
