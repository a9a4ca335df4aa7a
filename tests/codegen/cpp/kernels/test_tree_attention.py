"""llmc_paged_attention of trees: as its reference, and bit for bit what a node's path alone would give."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from llmc.formats.cache_format import parse_cache_formats
from llmc.runtime.speculation.draft import Draft
from llmc.targets import CpuTarget
from tests.codegen.cpp.paged_batch import PagedBatch, paged_batch
from tests.codegen.cpp.runnable_targets import CODED, RUNNABLE
from tests.codegen.cpp.tree_batch import BLOCK_SIZES, random_case, with_trees
from tests.random_trees import path_to, random_tree

FORMATS = ("int8:head", "int4:g8", "fp8:head")


def chain_of(batch: PagedBatch, request: int, tree: Draft, node: int) -> PagedBatch:
    """The node as the last token of a chain: its path's rows moved together, and no others."""
    begin = int(batch.query_starts[request])
    first = int(batch.context_lens[request]) - len(tree)
    path = path_to(tree, node)
    k_cache, v_cache = batch.k_cache.clone(), batch.v_cache.clone()
    for cache, source in ((k_cache, batch.k_cache), (v_cache, batch.v_cache)):
        for place, number in enumerate(path):
            move_row(batch, cache, source, request, first + number, first + place)
    return replace(
        batch,
        q=batch.q[begin + 1 + node : begin + 2 + node],
        k_cache=k_cache,
        v_cache=v_cache,
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([first + len(path)], dtype=torch.int32),
        block_tables=batch.block_tables[request : request + 1].contiguous(),
        tree_masks=None,
    )


def move_row(batch: PagedBatch, to: torch.Tensor, source: torch.Tensor, request: int, row: int, place: int) -> None:
    """Copy a request's row of the cache to another place, codes with their scales and minima."""
    size = batch.k_cache.shape[2]
    blocks = batch.block_tables[request]
    here, there = (int(blocks[row // size]), row % size), (int(blocks[place // size]), place % size)
    if batch.format is None:
        to[there[0], :, there[1]] = source[here[0], :, here[1]]
        return
    is_key = source is batch.k_cache
    format, channels = batch.format.of("k" if is_key else "v"), batch.q.shape[2] if is_key else batch.value_dim or 0
    codes = channels // 2 if format.has_minima else channels
    numbers = (format.position_bytes(channels) - codes) // 2
    # (where it begins, its bytes) of the codes, and of each scale and minimum.
    parts = [(0, codes), *((size * (codes + 2 * number), 2) for number in range(numbers))]
    for begin, width in parts:
        from_bytes, to_bytes = (cache.flatten(2)[:, :, begin:] for cache in (source, to))
        read, write = (slice(row * width, (row + 1) * width) for _, row in (here, there))
        to_bytes[there[0], :, write] = from_bytes[here[0], :, read]


def check(batch: PagedBatch, trees: dict[int, Draft], target: CpuTarget) -> None:
    """Every node against its chain in bits, everything against the reference, and neighbours without trees as alone."""
    tolerance = 1e-2 if torch.bfloat16 in (batch.q.dtype, batch.k_cache.dtype) else 3e-6
    together = with_trees(batch, trees)
    actual = together.run(target)
    torch.testing.assert_close(actual, together.expected(), rtol=tolerance, atol=tolerance)
    assert torch.equal(together.run(target, threads=3), actual)
    for request, tree in trees.items():
        begin = int(batch.query_starts[request])
        for node in range(len(tree)):
            alone = chain_of(batch, request, tree, node).run(target)
            assert torch.equal(actual[begin + 1 + node : begin + 2 + node], alone), (request, node)
    plain = batch.run(target)
    for request in {*range(len(batch.context_lens))} - trees.keys():
        begin, end = (int(batch.query_starts[number]) for number in (request, request + 1))
        assert torch.equal(actual[begin:end], plain[begin:end])


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("seed", range(12))
def test_a_node_has_the_bits_of_its_path(target: CpuTarget, seed: int) -> None:
    check(*random_case(seed), target)


@pytest.mark.parametrize("target", CODED)
@pytest.mark.parametrize("format", FORMATS)
def test_a_node_has_the_bits_of_its_path_over_codes(target: CpuTarget, format: str) -> None:
    batch, trees = random_case(1)
    check(batch.coded(parse_cache_formats(format)), trees, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", CODED)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("format", [None, *FORMATS])
@pytest.mark.parametrize("seed", range(10))
def test_any_tree_any_block_size_any_cache(target: CpuTarget, block_size: int, format: str | None, seed: int) -> None:
    """Two trees each: 400 for each instruction set."""
    draw = random.Random(seed)
    trees = {0: random_tree(draw, draw.randint(1, 63)), 1: random_tree(draw, draw.randint(1, 63))}
    batch = paged_batch(
        [(len(tree) + 1 + draw.randint(0, 300), len(tree) + 1) for tree in trees.values()],
        block_size=block_size,
        dtype=draw.choice([torch.float32, torch.bfloat16]),
        window=draw.choice([None, 50]),
        seed=seed,
    )
    check(batch if format is None else batch.coded(parse_cache_formats(format)), trees, target)


def test_a_tree_that_is_a_chain_hides_nothing() -> None:
    draft = Draft([1, 2, 3], [None, 0, 1])
    assert draft.masks() == Draft([1, 2, 3]).masks() == [0, 0, 0]


def test_what_a_node_does_not_see_is_hidden() -> None:
    # 0 ── 1 ── 3
    #  └── 2 ── 4 ── 5,  where 0 follows the last token, and 6 does too
    draft = Draft(range(7), [None, 0, 0, 1, 2, 4, None])
    hidden = [[i - d for d in range(1, 63) if mask >> d & 1] for i, mask in enumerate(draft.masks())]
    assert hidden == [[], [], [1], [2], [3, 1], [3, 1], [5, 4, 3, 2, 1, 0]]
