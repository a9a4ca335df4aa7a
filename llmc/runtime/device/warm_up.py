"""Steps that use every bucket before the first request: their tokens are in the block and the slot of the padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llmc.program import Limits, Program, StepOutput
from llmc.runtime.device.decode_inputs import request_buckets
from llmc.runtime.device.prompt_inputs import PromptSizes
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import BEST, RowChoice, RowChoices

_DRAWN, _FILTERED = BEST._replace(temperature=1.0), BEST._replace(temperature=1.0, top_p=0.9)


class WarmUpStep(NamedTuple):
    """A step with its output. choices: None for logits."""

    step: Step
    wanted: StepOutput
    choices: RowChoices | None


def warm_up_steps(
    program: Program, scratch_blocks: Sequence[int], scratch_slot: int, prompts: PromptSizes | None, limit: int
) -> list[WarmUpStep]:
    """A step for each bucket of decodes, and of prompts that one request can have, with the narrowest block tables, for
    each way of choosing tokens that the program has.

    Args:
        program: A program of one rank.
        scratch_blocks: The block of the padding in each group of caches.
        scratch_slot: The slot of states of the padding.
        prompts: The buckets of steps with prompts, if they have some.
        limit: The maximum number of steps. Greedy ones come first, and of these the smallest.

    Returns:
        Steps that write to nothing but the padding's memory; none for programs of whole texts, which have no decodes.
    """
    if not (program.caches or program.states):
        return []
    ways: dict[StepOutput, RowChoice] = {
        StepOutput.BEST: BEST,
        StepOutput.DRAWN: _DRAWN,
        StepOutput.FILTERED: _FILTERED,
    }
    known = {wanted for launch in program.launches for wanted in launch.wanted}
    found: list[WarmUpStep] = []
    for wanted in [way for way in ways if way in known] or [StepOutput.LOGITS]:
        for tokens, requests in _sizes(program.limits, prompts):
            step = _scratch_step(program, tokens, requests, scratch_blocks, scratch_slot)
            choices = None if wanted is StepOutput.LOGITS else RowChoices.of([ways[wanted]] * requests)
            found.append(WarmUpStep(step, wanted, choices))
    return found[:limit]


def _sizes(limits: Limits, prompts: PromptSizes | None) -> Iterator[tuple[int, int]]:
    """Numbers of tokens and of requests."""
    for requests in request_buckets(limits):
        yield requests, requests
    for tokens in () if prompts is None else prompts.tokens:
        if tokens <= limits.max_model_len:
            yield tokens, 1


def _scratch_step(program: Program, tokens: int, requests: int, blocks: Sequence[int], slot: int) -> Step:
    """A step of requests without earlier context. It needs the logits of each request's last token."""
    size, of_each, groups = program.limits.block_size, tokens // requests, blocks[1:]
    columns = -(-of_each // size)
    starts = np.arange(0, tokens + 1, of_each, dtype=np.int32)
    inside = np.arange(tokens, dtype=np.int32) % size
    lens = np.full(requests, of_each, np.int32)
    tables = np.array(blocks, np.int32)[:, None, None] + np.zeros((requests, columns), np.int32)
    slots = np.array(blocks, np.int32)[:, None] * size + inside
    return Step(
        input_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        slot_mapping=slots[0],
        query_starts=starts,
        context_lens=lens,
        block_tables=tables[0],
        logit_rows=starts[1:] - 1,
        tree_masks=np.zeros(tokens, np.int64),
        hidden=np.zeros((tokens, program.hidden_width), np.float32) if program.hidden_width else None,
        state_slots=np.full(requests, slot, np.int32) if program.states else None,
        group_slots=slots[1:] if groups else None,
        group_tables=tables[1:] if groups else None,
        group_lens=np.repeat(lens[None], len(groups), 0) if groups else None,
    )
