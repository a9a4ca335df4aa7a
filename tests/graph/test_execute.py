"""Any stage runs: whole, in chunks, and several sequences in one step."""

from __future__ import annotations

import pytest
import torch

from llmc.errors import RequestError
from llmc.graph.execute import Chunk, run_steps, run_tokens
from llmc.options import BuildOptions
from llmc.passes.pipeline import fusion, serving
from llmc.passes.runner import run_pipeline
from tests.graph_builder import llama

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.mark.parametrize("chunk_sizes", [None, [9], [4, 5], [1] * 9, [6, 1, 2]])
@pytest.mark.parametrize("block_size", [2, 16])
def test_chunks_give_what_the_whole_sequence_gives(chunk_sizes: list[int] | None, block_size: int) -> None:
    graph, source = llama()
    wanted = run_tokens(graph, source, TOKENS)
    assert wanted.shape == (9, 17) and wanted.dtype is torch.float32
    served = run_pipeline(graph, (*serving(), *fusion()), BuildOptions()).graph
    seen = run_tokens(served, source, TOKENS, chunk_sizes=chunk_sizes, block_size=block_size)
    torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-5)


def test_sequences_of_one_step_do_not_see_each_other() -> None:
    graph, source = llama()
    served = run_pipeline(graph, serving(), BuildOptions()).graph
    other = [7, 7, 8]
    steps = [[Chunk(0, 0, tuple(TOKENS[:5])), Chunk(1, 0, (7, 7))], [Chunk(1, 2, (8,)), Chunk(0, 5, tuple(TOKENS[5:]))]]
    (first, second), (third, fourth) = run_steps(served, source, steps, block_size=4)
    torch.testing.assert_close(torch.cat([first, fourth]), run_tokens(graph, source, TOKENS), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([second, third]), run_tokens(graph, source, other), rtol=0, atol=1e-5)


def test_chunks_must_cover_the_tokens() -> None:
    graph, source = llama(layers=1)
    with pytest.raises(RequestError, match=r"9 tokens cannot be run in chunks of \[4, 4\]"):
        run_tokens(graph, source, TOKENS, chunk_sizes=[4, 4])
    with pytest.raises(RequestError, match=r"0 tokens cannot be run"):
        run_tokens(graph, source, [])


def test_a_graph_without_a_cache_cannot_start_later() -> None:
    graph, source = llama(layers=1)
    with pytest.raises(RequestError, match="a canonical graph has no cache, so it cannot start at position 4"):
        run_tokens(graph, source, TOKENS, chunk_sizes=[4, 5])
