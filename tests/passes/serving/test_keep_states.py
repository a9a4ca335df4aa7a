"""States in slots: same logits for one sequence cut into steps and for several, and what cannot be kept is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmc.errors import PassError
from llmc.graph.execute import Chunk, run_steps, run_tokens
from llmc.graph.model_graph import AttachedDraft, ModelGraph
from llmc.graph.render import render
from llmc.options import BuildOptions
from llmc.passes.pipeline import parallel
from llmc.passes.runner import run_pipeline
from llmc.passes.serving.keep_states import keep_states
from llmc.passes.serving.page_kv_cache import page_kv_cache
from tests.graph_builder import GraphBuilder, TensorSource
from tests.passes.pass_checks import rewrites

PASSES = (page_kv_cache, keep_states)
TOKENS = [5, 3, 11, 2, 7, 7, 1]


def recurrent() -> tuple[ModelGraph, TensorSource]:
    """A model of one op of each kind, one after the other."""
    op, b = torch.ops.llmc, GraphBuilder()
    h = b.embedded()
    convolved = b.call(op.causal_conv.default, h, b.weight("taps", 3, 8), b.weight("bias", 8))
    dt = b.call(torch.ops.aten.sigmoid.default, convolved)
    rates = b.weight("rates", 8, 5)
    wide = b.linear(h, "bc", 10)
    parts = [b.call(torch.ops.aten.slice.Tensor, wide, 1, start, start + 5) for start in (0, 5)]
    scanned = b.call(op.selective_scan.default, convolved, dt, rates, *parts)
    heads = [b.call(torch.ops.aten.reshape.default, x, [-1, 2, 4]) for x in (h, convolved, scanned)]
    decay = b.call(torch.ops.aten.neg.default, b.call(torch.ops.aten.sigmoid.default, b.linear(h, "decay", 2)))
    attended = b.call(op.linear_attention.default, *heads, decay)
    joined = b.call(torch.ops.aten.reshape.default, attended, [-1, 8])
    return b.finish(b.call(op.linear_recurrence.default, joined, dt))


def test_keeps_every_state(golden: Callable[[str, str], None]) -> None:
    graph, source = recurrent()
    result = run_pipeline(graph, PASSES, BuildOptions())
    golden("passes/keep_states.txt", render(result.graph))
    assert [state.shape for state in result.graph.states] == [(2, 8), (8, 5), (2, 4, 4), (8,)]
    whole = run_tokens(graph, source, TOKENS)
    assert torch.isfinite(whole).all()
    for sizes in ([7], [1, 3, 1, 2], [1] * 7):
        torch.testing.assert_close(run_tokens(result.graph, source, TOKENS, chunk_sizes=sizes), whole)
    assert rewrites(run_pipeline(result.graph, PASSES, BuildOptions()).records) == 0


def test_sequences_of_a_step_do_not_know_of_each_other() -> None:
    graph, source = recurrent()
    kept = run_pipeline(graph, PASSES, BuildOptions()).graph
    other = tuple(reversed(TOKENS))
    steps = [[Chunk(1, 0, other[:2]), Chunk(0, 0, tuple(TOKENS[:4]))], [Chunk(0, 4, tuple(TOKENS[4:]))]]
    last = [Chunk(1, 2, other[2:])]
    (second, first), (rest,), (end,) = run_steps(kept, source, [*steps, last])
    torch.testing.assert_close(torch.cat((first, rest)), run_tokens(graph, source, TOKENS))
    torch.testing.assert_close(torch.cat((second, end)), run_tokens(graph, source, other))


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 5])
def test_runs_when_cut_half_way(stop_after: int) -> None:
    graph, source = recurrent()
    cut = run_pipeline(graph, PASSES, BuildOptions(stop_after=stop_after)).graph
    torch.testing.assert_close(run_tokens(cut, source, TOKENS), run_tokens(graph, source, TOKENS))


def test_refuses_drafts() -> None:
    graph, _ = recurrent()
    draft, _ = recurrent()
    graph.draft = AttachedDraft(draft, "mtp", None)
    with pytest.raises(PassError, match="4 of 4 states cannot be kept: a rejected draft cannot be removed"):
        run_pipeline(graph, PASSES, BuildOptions())


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks_are_refused(option: str) -> None:
    graph, _ = recurrent()
    with pytest.raises(PassError, match="4 states, and states are not divided among ranks") as caught:
        run_pipeline(graph, parallel(), BuildOptions.model_validate({option: 2}))
    assert caught.value.at == f"{option}=2"


def test_refuses_what_is_not_the_steps_tokens() -> None:
    op, b = torch.ops.llmc, GraphBuilder()
    h = b.embedded()
    half = b.call(torch.ops.aten.slice.Tensor, h, 0, 0, 2)
    convolved = b.call(op.causal_conv.default, half, b.weight("taps", 3, 8), None)
    total = b.call(torch.ops.aten.sum.dim_IntList, convolved, [0], True)
    graph, _ = b.finish(b.call(torch.ops.aten.add.Tensor, h, total))
    with pytest.raises(PassError, match=r"1 of 1 states cannot be kept: slice_tensor.* not one row for each"):
        run_pipeline(graph, PASSES, BuildOptions())
    left = run_pipeline(graph, PASSES, BuildOptions(allow_fallback=("states",))).graph
    assert left.states == ()
