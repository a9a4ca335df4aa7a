"""A padded step of a prompt and a decode, interpreted: the bits of its own rows, and nothing written but to their slots
and the block of the padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.options import BuildOptions
from llmc.runtime.device.inputs import largest_shape
from llmc.runtime.device.prompt_inputs import PromptInputs, prompt_sizes
from llmc.runtime.loop.step import Step
from tests.codegen.tiny_models import llama
from tests.codegen.triton.device_harness import interpreter
from tests.gpu_target import gpu_target
from tests.runtime.device.staged_step import staged_step

OPTIONS = BuildOptions(max_batch_tokens=32, max_sequences=4, max_logit_rows=16, max_model_len=32)
H100 = gpu_target("h100")
# Blocks of 16 rows; the last is the padding's.
BLOCKS = 5


def step_of(counts: list[int], contexts: list[int]) -> Step:
    """Requests with these tokens, the last of their contexts; request r has blocks 2·r and 2·r + 1."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    places = np.concatenate([np.arange(end - n, end) for n, end in zip(counts, contexts, strict=True)])
    tables = np.arange(2 * len(counts), dtype=np.int32).reshape(-1, 2)
    owners = np.repeat(np.arange(len(counts)), counts)
    return Step(
        input_ids=(np.arange(starts[-1]) * 7 % 60 + 3).astype(np.int32),
        positions=places.astype(np.int32),
        slot_mapping=(tables[owners, places // 16] * 16 + places % 16).astype(np.int32),
        query_starts=starts,
        context_lens=np.array(contexts, np.int32),
        block_tables=tables,
        logit_rows=starts[1:] - 1,
        tree_masks=np.zeros(starts[-1], np.int64),
    )


def test_padding_changes_no_bit_and_writes_its_own_block_only(tmp_path: Path) -> None:
    graph, source = llama(torch.float32, layers=2)
    lowered = lower_device(graph, H100, OPTIONS)
    limits, sizes = lowered.program.limits, prompt_sizes(lowered.program, H100)
    memory = np.zeros(largest_shape(limits).input_bytes(chooses=True), np.uint8)
    inputs = PromptInputs(limits, sizes, memory, (BLOCKS - 1,), 0)
    plain, padded = (interpreter(lowered, source, BLOCKS, tmp_path) for _ in range(2))
    for counts, contexts in (([18, 2], [18, 2]), ([1, 5], [19, 7])):
        step = step_of(counts, contexts)
        shape = inputs.write(step, None)
        assert shape is not None and shape.tokens > len(step.input_ids) and shape.logit_rows >= 2
        wanted = plain.step(step).copy()
        np.testing.assert_array_equal(padded.step(staged_step(memory, shape, step))[: len(wanted)], wanted)
    for name in lowered.program.cache_names():
        ours, theirs = (executor._memory["cache", name].view(BLOCKS, -1) for executor in (padded, plain))
        assert torch.equal(ours[:-1], theirs[:-1])
        assert ours[-1].any() and not theirs[-1].any()
