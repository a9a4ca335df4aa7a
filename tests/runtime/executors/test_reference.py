"""The reference executor computes each token alone: its bits are the same whatever else a step has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import llmc
from llmc.runtime.engine import Engine
from llmc.runtime.executors.reference_tiles import TILE, tiles_of
from llmc.runtime.loop.step import Step
from tests.plain_modules import sdpa_decoder
from tests.quick_sample import quick_sample


def logprobs(engine: Engine, prompts: list[list[int]]) -> list[object]:
    params = llmc.SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=1)
    return [
        [(p.logprob.hex(), p.top) for p in completion.choices[0].logprobs or ()]
        for completion in engine.generate(prompts, params)
    ]


def test_alone_and_in_company() -> None:
    generator = np.random.default_rng(0)
    with llmc.compile(sdpa_decoder().to(torch.bfloat16), target="reference", max_batch_tokens=48) as engine:
        vocab = engine.info.vocab_size
        prompts = [generator.integers(0, vocab, n).tolist() for n in (1, 3, 17, 40, 9, 30)]
        alone = [logprobs(engine, [prompt])[0] for prompt in prompts]
        # Steps of 48 tokens cut the prompts where their neighbours leave room.
        assert logprobs(engine, prompts) == alone
        assert logprobs(engine, prompts[::-1]) == alone[::-1]


def test_a_token_stands_where_its_position_puts_it() -> None:
    ints = np.int32
    step = Step(
        input_ids=np.arange(100, 121, dtype=ints),
        positions=np.array([5, *range(10, 30)], ints),
        slot_mapping=np.arange(200, 221, dtype=ints),
        query_starts=np.array([0, 1, 21], ints),
        context_lens=np.array([6, 30], ints),
        block_tables=np.array([[7, 0], [8, 9]], ints),
        logit_rows=np.array([0, 20], ints),
        tree_masks=np.zeros(21, np.int64),
    )
    tiles = list(tiles_of(step, spare_slots=(999,)))
    assert [tile.wanted.tolist() for tile in tiles] == [[5], [], [13]]
    for tile in tiles:
        rows = np.flatnonzero(tile.step.slot_mapping != 999)
        assert len(tile.step.input_ids) == TILE
        assert (tile.step.positions[rows] % TILE == rows).all()
        assert tile.step.query_starts.tolist() == [*rows, rows[-1] + 1]
        assert (tile.step.context_lens == tile.step.positions[rows] + 1).all()
    ids = np.concatenate([tile.step.input_ids[tile.step.slot_mapping != 999] for tile in tiles])
    assert ids.tolist() == step.input_ids.tolist()


@pytest.mark.parametrize("ranks", quick_sample([2, 3], [3]))
def test_ranks_in_one_process(ranks: int) -> None:
    """Also where blocks are copied, on every rank, and rows moved."""
    module, prompts = sdpa_decoder(), [[1, 2, 3, 4, 5], [7, 8], [3] * 20]
    outcomes = []
    for count in (1, ranks):
        with llmc.compile(module, target="reference", max_batch_tokens=48, tensor_parallel_size=count) as engine:
            sampling = llmc.SamplingParams(max_tokens=6, temperature=0.8, seed=3, n=2)
            outcomes.append((engine.generate(prompts, sampling), engine.logits(prompts[0])))
    (alone, expected), (together, logits) = outcomes
    assert [c.token_ids for completion in together for c in completion.choices] == [
        c.token_ids for e in alone for c in e.choices
    ]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
