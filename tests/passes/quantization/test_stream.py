"""Values of a graph's nodes on many sequences: joined along the tokens, and so many of them as are wanted."""

from __future__ import annotations

import pytest
import torch

from llmc.passes.quantization.stream import Stream
from tests.passes.quantization.quantizing import TOKENS, captured_llama


@pytest.mark.parametrize(("limit", "rows"), [(None, 12), (12, 12), (11, 11), (2, 2)])
def test_rows_are_spread_evenly_over_all_sequences(limit: int | None, rows: int) -> None:
    captured = captured_llama()
    embedded = next(n for n in captured.graph.graph.nodes if n.target is torch.ops.llmc.embedding.default)
    ids = torch.tensor(TOKENS[:12])
    stream = Stream(captured.graph, captured.source, ids.split([7, 5]))
    for _ in stream.stops([next(iter(embedded.users))]):
        some_rows, everything = stream.rows(embedded, limit), stream.rows(embedded)
        assert len(everything) == 12 and len(some_rows) == rows
        assert torch.equal(some_rows[0], everything[0]) and torch.equal(some_rows[-1], everything[-1])
