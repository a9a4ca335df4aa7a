"""More ranks than can be used are an error that names the most that can; fewer all have some."""

from __future__ import annotations

import pytest

from llmc.errors import PassError
from tests.graph_builder import llama
from tests.passes.parallel.test_faults_of_peers import attention, parts_of
from tests.passes.parallel.test_partition import close, cut


def test_more_ranks_than_heads() -> None:
    """Ranks that attend to nothing would only wait for the others."""
    graph, source = attention(6, 3, 64, head=16)
    close(graph, cut(graph, 6).graph, source)
    with pytest.raises(PassError) as caught:
        cut(graph, 8)
    assert caught.value.fix == "the maximum is tensor_parallel_size=6"
    assert caught.value.at == "tensor_parallel_size=8"
    assert "8 tensor ranks are more than can be used: the 96 elements of q_weight" in caught.value.problem
    assert "in 6 parts that stay together, such as heads, and 2 of the ranks would get none" in caught.value.problem


def test_the_most_that_is_named_can_be_used() -> None:
    """By all layers of a model, not by heads alone."""
    graph, _ = llama(layers=1)
    with pytest.raises(PassError) as caught:
        cut(graph, 64)
    assert caught.value.fix is not None
    most = int(caught.value.fix.rpartition("=")[2])
    assert cut(graph, most).graph.ranks == most


def test_no_rank_is_left_out_that_can_have_some() -> None:
    """Four query heads with two of keys are one, one and two on three ranks, not two, two and none."""
    graph, source = attention(4, 2, 64, head=16)
    result = cut(graph, 3).graph
    close(graph, result, source)
    assert sorted(parts_of(result, "q_weight")) == [16, 16, 32]
