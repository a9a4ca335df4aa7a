"""Running only what differs gives what running everything gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from llmc.debug.memo_run import MemoRun, default_chunks
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord
from llmc.graph.weights import WeightSource
from llmc.options import BuildOptions
from llmc.passes import default
from llmc.passes.runner import run_pipeline
from tests.family_captures import FamilyCaptures
from tests.tiny_models import tiny_tokens

TOKENS = tiny_tokens(11)


class CountingSource:
    """A source that counts what is read of it."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.reads = 0

    def names(self) -> tuple[str, ...]:
        return self._source.names()

    def load(self, name: str) -> Tensor:
        self.reads += 1
        return self._source.load(name)


@pytest.mark.parametrize("family", ["llama", "gemma2", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_it_equals_a_plain_run_after_every_pass(captured_family: FamilyCaptures, family: str) -> None:
    captured = captured_family(family).captured
    runner = MemoRun(captured.source, TOKENS, chunk_sizes=default_chunks(len(TOKENS)), block_size=16)

    def check(record: PassRecord, graph: ModelGraph) -> None:
        if record.rewrites:
            plain = run_tokens(graph, captured.source, TOKENS)
            torch.testing.assert_close(runner.logits(graph), plain, rtol=0, atol=1e-5 * float(plain.std()))

    run_pipeline(captured.graph, default(), BuildOptions(), check)


def test_what_was_computed_is_not_computed_again(captured_family: FamilyCaptures) -> None:
    captured = captured_family("llama").captured
    source = CountingSource(captured.source)
    runner = MemoRun(source, TOKENS, chunk_sizes=(len(TOKENS),), block_size=16)
    first = runner.logits(captured.graph)
    reads = source.reads
    assert reads > 0
    assert runner.logits(captured.graph.copy()) is first
    assert source.reads == reads


def test_chunks_must_add_up(captured_family: FamilyCaptures) -> None:
    with pytest.raises(ValueError, match="11 tokens cannot be run in chunks"):
        MemoRun(captured_family("llama").captured.source, TOKENS, chunk_sizes=(5, 5), block_size=16)


def test_a_second_step_reads_what_the_first_cached() -> None:
    assert list(_sums()) == [(2,), (3,), (3, 1), (24, 8)]


def _sums() -> Iterator[tuple[int, ...]]:
    for count in (2, 3, 4, 32):
        chunks = default_chunks(count)
        assert sum(chunks) == count
        yield chunks
