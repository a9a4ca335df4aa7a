"""A product that only slices read is taken apart, whole heads of it, too."""

from __future__ import annotations

import pytest
import torch

from llmc.graph.execute import run_tokens
from llmc.options import BuildOptions
from llmc.passes.parallel.separate_products import separate_products
from llmc.passes.runner import run_pipeline
from tests.graph_builder import GraphBuilder
from tests.passes.pass_checks import rewrites

aten = torch.ops.aten


@pytest.mark.parametrize("in_heads", [True, False])
def test_slices_of_a_product_become_products(in_heads: bool) -> None:
    b = GraphBuilder()
    h = b.embedded()
    reader, width = b.linear(h, "qkv", 32, bias=True), 4
    if in_heads:
        reader, width = b.call(aten.reshape.default, reader, [-1, 8, 4]), 1
    q, k, v = (
        b.call(aten.slice.Tensor, reader, 1, width * start, width * end) for start, end in ((0, 4), (4, 6), (6, 8))
    )
    if not in_heads:
        q, k, v = (b.call(aten.reshape.default, part, [-1, heads, 4]) for part, heads in ((q, 4), (k, 2), (v, 2)))
    attention = b.call(torch.ops.llmc.attention.default, q, k, v, 0.5)
    out = b.linear(b.call(aten.reshape.default, attention, [-1, 16]), "out", 8)
    graph, source = b.finish(b.call(aten.add.Tensor, h, out))
    result = run_pipeline(graph, (separate_products,), BuildOptions(tensor_parallel_size=2))
    assert rewrites(result.records) == 1
    products = result.graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.linear.default)
    assert [int(node.meta["val"].shape[1]) for node in products] == [16, 8, 8, 8]
    tokens = [3, 1, 4, 1, 5, 9]
    torch.testing.assert_close(run_tokens(result.graph, source, tokens), run_tokens(graph, source, tokens))
